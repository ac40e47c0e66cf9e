"""docs/plugins.md: its files register one part of each kind, and every part does what its kind is
for, where rft's own do it.
"""

import io
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rft.algorithm import credit, recipe, token_credit
from rft.algorithm.fields import Fields
from rft.buffer.selection import Replay
from rft.config import (
    AlgorithmConfig,
    Config,
    ConfigError,
    DataJuicerConfig,
    FormatConfig,
    MonitorConfig,
    OperatorConfig,
    TaskSelectorConfig,
    TasksetConfig,
)
from rft.config.buffer import ReplayBufferConfig
from rft.data import formats
from rft.data.packing import Packed
from rft.data.taskset import TaskDefaults, Taskset
from rft.extras.pipeline.operators import make
from rft.extras.pipeline.worker_process import EXPERIENCES, TASKS
from rft.ground import plugins
from rft.ground.experience import Batch, Experience
from rft.monitor import sinks
from rft.preflight.fill import fill_algorithm
from rft.rollout import rewards, workflows
from rft.tools import studio, studio_fields
from rft.trainer.feed import Feed

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
FILES = re.findall(r"```python\n(# plugins/(\w+\.py)\n.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The page's files, loaded; the tables and the variable are put back."""
    place = tmp_path_factory.mktemp("page") / "plugins"
    place.mkdir()
    for text, name in FILES:
        (place / name).write_text(text, encoding="utf-8")
    before = {kind: dict(plugins.table_of(kind)) for kind in plugins.TABLES}
    variable = os.environ.pop(plugins.VARIABLE, None)
    plugins.load([str(place)])
    yield place
    for kind, table in before.items():
        plugins.table_of(kind).clear()
        plugins.table_of(kind).update(table)
    os.environ.pop(plugins.VARIABLE)
    os.environ |= {plugins.VARIABLE: variable} if variable else {}


def of_page(kind: str) -> set[str]:
    texts = "".join(text for text, _ in FILES)
    return set(re.findall(rf'register\("{kind}", "(\w+)"\)', texts))


def test_there_is_one_example_of_each_kind(directory: Path) -> None:
    for kind in plugins.TABLES:
        assert of_page(kind) and of_page(kind) < set(plugins.table_of(kind)), kind
        assert f"`{kind}`" in PAGE, f"the page's table says nothing of {kind}"


def group(*given: float) -> list[Experience]:
    return [
        Experience(tokens=[1, 2, 3], prompt_length=1, action_mask=[1, 1], group=0, reward=reward)
        for reward in given
    ]


def test_workflow_and_reward(directory: Path) -> None:
    assert workflows.resolve("shout") is not None
    assert rewards.resolve("short_and_right")("so 4", "4", None) == {"right": 1.0, "short": 0.1}


def test_algorithm_advantage_loss_and_kl(directory: Path) -> None:
    import torch

    given = AlgorithmConfig(algorithm_type="best_of", kl_loss_fn="squared_ratio")
    given.advantage_fn_args, given.kl_loss_fn_args = {"share": 0.5}, {"kl_coef": 2.0, "most": 0.5}
    algorithm = fill_algorithm(given)
    recipe.check(algorithm)
    assert (algorithm.repeat_times, algorithm.advantage_fn) == (4, "versus_best")
    judged = credit.judge(group(1.0, 4.0), algorithm.advantage_fn, algorithm.advantage_fn_args)
    assert judged.advantages.tolist() == [-1.0, 2.0]
    ones = torch.ones(1)
    fields = Fields(ones * 0, ones * 3, ones, ones > 0, reference=torch.tensor([-3.0]))
    loss, metrics = recipe.policy_loss(algorithm)(torch.tensor([-1.0]), fields)
    assert loss.item() == pytest.approx(3.0 + 2.0 * 0.25) and metrics["kl/reference"].item() == 0.25


def packed(**scores: list[float]) -> Packed:
    """Two prompt tokens and three trained ones."""
    trained = np.array([0, 0, 1, 1, 1], dtype=np.float32)
    return Packed(
        tokens=np.arange(5),
        labels=np.arange(5),
        positions=np.arange(5),
        cu_seqlens=np.array([0, 5], np.int32),
        behaviour=np.zeros(5, np.float32),
        advantage=np.zeros(5, np.float32),
        weight=trained,
        temperature=np.ones(5, np.float32),
        scores={name: np.array(values, np.float32) for name, values in scores.items()},
        rows=np.array([0], np.int32),
    )


def test_advantages_of_tokens_and_a_penalty(directory: Path) -> None:
    """The KL function is asked by what takes it off the rewards too, with its own argument."""
    given = AlgorithmConfig(
        algorithm_type="grpo",
        advantage_fn="last_tokens",
        advantage_fn_args={"count": 2},
        kl_penalty_fn="squared_ratio",
        kl_penalty_fn_args={"kl_coef": 1.0, "most": 0.5},
    )
    algorithm = fill_algorithm(given)
    recipe.check(algorithm)
    part = [packed(reward=[0, 0, 0, 0, 1], reference=[0, 0, -9, 0, 0], proximal=[0] * 5)]
    (found,), _ = token_credit.credited(part, algorithm, True, lambda sums: sums)
    assert found.advantage.tolist() == [0.0, 0.0, 0.0, 0.75, 0.75]


def test_sample_strategy(directory: Path) -> None:
    algorithm = AlgorithmConfig(
        algorithm_type="grpo",
        advantage_fn="grpo",
        sample_strategy="rewarded",
        sample_strategy_args={"at_least": 0.5},
        loss_agg_mode="token-mean",
    )

    class Alone:
        rank, dp = 0, 1

    feed = Feed(None, Alone(), algorithm, 8, 1, None)  # type: ignore[arg-type]
    (metrics, groups, _), rows = feed._rows(Batch(step=3, experiences=group(0.0, 1.0, 2.0)), {})
    assert len(rows) == len(groups) == 2 and metrics["sample/left_out"] == 1.0


def test_priority(directory: Path) -> None:
    config = ReplayBufferConfig(
        enable=True, priority_fn="twice", priority_fn_args={"decay": 1}, reuse_cooldown_time=0.0
    )
    replay = Replay(config, seed=0)
    assert replay.function.priority(7.0, 1, "") == 6.0
    assert [replay.function.stays(uses) for uses in (0, 1, 2)] == [True, True, False]


def test_selector_and_row_format_where_they_are_used(directory: Path, tmp_path: Path) -> None:
    """In a process that was sent the taskset before it loaded the plug-ins, as the explorer is."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"instruction": "q{n}", "output": "a{n}"}}\n' for n in range(6)))
    config = TasksetConfig(
        path=str(file),
        format=FormatConfig(prompt_type="alpaca"),
        task_selector=TaskSelectorConfig(selector_type="every_nth", kwargs={"stride": 2}),
    )
    taskset = Taskset(config, TaskDefaults("single_turn", "math", 1, 8, 1.0), batch_size=2)
    (tmp_path / "sent").write_bytes(pickle.dumps(taskset))
    program = (
        "import pickle, sys; from rft.ground import plugins\n"
        "taskset = pickle.load(open(sys.argv[1], 'rb')); plugins.load()\n"
        "print([task.prompt[0]['content'] for task in taskset])"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "sent")]
    variable = {plugins.VARIABLE: str(directory)}
    ended = subprocess.run(command, env=os.environ | variable, capture_output=True, text=True)
    assert ended.stdout == "['q0', 'q2', 'q4', 'q1', 'q3', 'q5']\n", ended.stderr


def test_monitor(directory: Path, tmp_path: Path) -> None:
    config = MonitorConfig(monitor_type="csv", monitor_args={"sep": ";"})
    with sinks.build(config, tmp_path, "p", "n", stream=io.StringIO()) as monitor:
        monitor.log({"loss": 0.5}, 3)
    assert (tmp_path / "metrics.csv").read_text() == "3;loss;0.5\n"


def test_operators(directory: Path) -> None:
    def made(key: str, name: str, **args: Any) -> Any:
        return make(key, 0, OperatorConfig(name=name, args=args), DataJuicerConfig())

    halved, _ = made(EXPERIENCES, "halve").process(group(1.0))
    lowered, _ = made(TASKS, "lower", field="q").process([{"q": "ABC"}])
    assert halved[0].reward == 0.5 and lowered == [{"q": "abc"}]


TASKSET, QUEUE = "buffer.explorer_input.taskset", "buffer.trainer_input.experience_buffer"
NAMES = {  # what one config says, and what is said of it: the nearest name of all there are
    "algorithm.advantage_fn=last_token": "did you mean `last_tokens`",
    "algorithm.policy_loss_fn=plane": "did you mean `plain`",
    "algorithm.kl_loss_fn=squared_ration": "did you mean `squared_ratio`",
    "monitor.monitor_type=cvs": "did you mean `csv`",
    f"{TASKSET}.task_selector.selector_type=every_nht": "did you mean `every_nth`",
    f"{TASKSET}.format.prompt_type=alpacca": "did you mean `alpaca`",
    f"{QUEUE}.replay_buffer.priority_fn=twise": "did you mean `twice`",
}
VALUES = {
    "algorithm.algorithm_type=best_of +algorithm.policy_loss_fn_args.scael=1": (
        "policy_loss_fn_args.scael is unknown; known: scale"
    ),
    "algorithm.kl_loss_fn=squared_ratio +algorithm.kl_loss_fn_args.most=x": "most=x: give a number",
    "monitor.monitor_type=csv +monitor.monitor_args.separator=a": "it takes sep",
    f"{TASKSET}.task_selector.selector_type=every_nth +{TASKSET}.task_selector.kwargs.stride=x": (
        "kwargs.stride=x: give a number, like 3"
    ),
    f"{TASKSET}.format.prompt_type=alpaca": f"{TASKSET}.format.prompt_type=alpaca: row 1 of ",
    f"{QUEUE}.replay_buffer.priority_fn=twice +{QUEUE}.replay_buffer.priority_fn_args.sigma=1": (
        "it takes decay"
    ),
}
TYPE = {"algorithm.algorithm_type=best_off": "did you mean `best_of`"}
STRATEGY = {"algorithm.sample_strategy=reward": "did you mean `rewarded`"}
STRATEGY_ARGS = {
    "algorithm.sample_strategy=rewarded +algorithm.sample_strategy_args.at_most=1": (
        "sample_strategy_args.at_least is not set: sample_strategy=rewarded needs it"
    )
}


@pytest.mark.parametrize("wrong", [NAMES, VALUES, TYPE, STRATEGY, STRATEGY_ARGS])
def test_they_are_checked_as_built_in_ones_are(
    directory: Path, assets: Path, wrong: dict[str, str]
) -> None:
    from rft.config import compose
    from rft.train import prepared_stages

    words = [word for given in wrong for word in given.split()]
    with pytest.raises(ConfigError) as refused:
        prepared_stages(compose([*least(directory, assets), *words]))
    said = "\n".join(refused.value.problems)
    assert [sentence for sentence in wrong.values() if sentence not in said] == [], said


def least(directory: Path, assets: Path) -> list[str]:
    return [
        "experiment=grpo",
        "device=cpu",
        f"plugin_dirs=[{directory}]",
        f"model.model_path={assets / 'model'}",
        "model.max_prompt_tokens=16",
        "model.max_response_tokens=8",
        f"buffer.explorer_input.taskset.path={assets / 'train.jsonl'}",
        f"checkpoint_root_dir={directory / 'runs'}",
    ]


def test_the_studio_offers_what_was_named_at_its_start(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = {field.key: field for field in studio_fields.fields()}
    assert "best_of" in shown["algorithm.algorithm_type"].choices
    assert "csv" in shown["monitor.monitor_type"].choices
    for key, name in (
        ("algorithm.kl_loss_fn", "squared_ratio"),
        ("algorithm.sample_strategy", "rewarded"),
        ("buffer.explorer_input.taskset.task_selector.selector_type", "every_nth"),
        ("buffer.explorer_input.taskset.format.prompt_type", "alpaca"),
    ):
        assert name in shown[key].suggested and len(shown[key].suggested) > 1
    shutil.copytree(directory, tmp_path / "other")
    (tmp_path / "other" / "late.py").write_text("raise SystemExit('imported by a request')")
    monkeypatch.setattr(plugins, "load", lambda *_: pytest.fail("a request imports"))
    studio.recipe.cache_clear()
    found = studio.examine("grpo", {"plugin_dirs": f"[{tmp_path / 'other'}]"})
    assert str(tmp_path / "other") in found["yaml"]
    found = studio.examine("grpo", {})
    studio.recipe.cache_clear()
    assert str(directory) in found["yaml"], "the file does not start without its plug-ins"


def test_the_studio_is_told_of_them_when_it_starts(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    served: list[object] = []
    monkeypatch.setattr(studio.local_page, "serve", lambda *given: served.append(given) or 0)
    assert studio.main([f"plugin={directory}"]) == 0 and len(served) == 1
    assert studio.main(["plugins"]) == studio.main([f"plugin={tmp_path}/none"]) == 2
    assert "give plugin=DIRECTORY" in capsys.readouterr().err and len(served) == 1


def test_a_config_has_defaults_of_every_table() -> None:
    """What a schema's default names is in the table that its key is looked up in."""
    config = Config()
    assert config.monitor.monitor_type in plugins.table_of("monitor")
    assert formats.has_messages(FormatConfig()) and "messages" in plugins.table_of("row_format")
    assert ReplayBufferConfig().priority_fn in plugins.table_of("priority")
