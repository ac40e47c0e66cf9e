"""`rft debug` as far as it needs no engine: which task it takes, and what it prints of a token."""

from pathlib import Path

import numpy as np
import pytest

from rft import config as configs
from rft.buffer import experience_file
from rft.config import ConfigError
from rft.ground.experience import Experience, VersionSpan
from rft.tools import debug
from rft.tools.view import tokenizer_of
from tests.unit.test_config import grpo


def test_it_takes_a_row_of_the_named_set_and_touches_nothing_of_the_run(
    assets: Path, tmp_path: Path
) -> None:
    held_out = (
        f"{{name: held_out, path: {assets / 'eval.jsonl'}, format: {{prompt_type: plaintext}}}}"
    )
    stages = grpo(assets, tmp_path, f"buffer.explorer_input.eval_tasksets=[{held_out}]")
    config = debug.explored(stages)
    assert (
        config.name == f"{stages[0].name}_debug"
        and config.mode == "bench"
        and stages[0].mode == "both"
    )
    assert debug.chosen(config, None).at(3).row == 3
    assert debug.chosen(config, "held_out").at(5).id == "held_out/0/5"
    with pytest.raises(ConfigError, match="held_out"):
        debug.chosen(config, "held_ot")
    with pytest.raises(ConfigError, match="rows 0 to 15"):
        debug.chosen(config, "held_out").at(16)


def test_a_config_without_tasks_is_refused(assets: Path, tmp_path: Path) -> None:
    stages = grpo(assets, tmp_path)
    stages[0].buffer.explorer_input.taskset = None
    with pytest.raises(ConfigError, match="taskset"):
        debug.explored(stages)


def test_a_line_per_token_says_all_of_it(assets: Path) -> None:
    experience = Experience(
        tokens=[5, 6, 9, 10],
        prompt_length=2,
        action_mask=[1, 0],
        logprobs=[-0.25, 0.0],
        versions=[VersionSpan(version=7, start=0, end=1)],
        token_rewards=[0.0, 1.5],
    )
    header, first, second = debug.table(experience, tokenizer_of(assets, str(assets / "model")))
    assert header.split() == ["#", "id", "trained", "logprob", "version", "token", "reward"]
    assert first.split()[:5] == ["0", "9", "yes", "-0.2500", "7"] and first.endswith("  0")
    assert second.split()[:4] == ["1", "10", "no", "0.0000"] and second.endswith("  1.5")


def test_what_it_has_seen_is_a_file_that_a_run_may_train_on(
    assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """`rft debug` twice, with what an engine would have answered."""
    stages = grpo(assets, tmp_path)
    seen = Experience(
        tokens=np.int32([5, 6, 9, 10]),
        prompt_length=2,
        action_mask=np.array([True, False]),
        logprobs=np.float32([-0.25, 0.0]),
        versions=[VersionSpan(version=0, start=0, end=1)],
    )
    monkeypatch.setattr(debug.train, "prepared_stages", lambda composed: stages)
    monkeypatch.setattr(debug, "attempt", lambda config, task: [seen])
    configs.job_dir(debug.explored(stages)).mkdir(parents=True)
    assert debug.main([]) == debug.main(["--row", "1"]) == 0
    told = capsys.readouterr().out
    path = Path(told.split("added to ")[1].split()[0])
    assert told.count("\nexperience ") == 2
    assert [one for group in experience_file.read(path) for one in group] == [seen, seen]
