"""`rft debug` as far as it needs no engine: which task it takes, and what it prints of a token."""

from pathlib import Path

import pytest

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
