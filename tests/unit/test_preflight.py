"""What a start looks at before it begins: every taskset, every section, everything at once."""

import socket
from pathlib import Path

import pytest

from rft import config as configs
from rft import preflight
from rft.config import ConfigError
from rft.preflight.rules import Refusals
from rft.preflight.rules_data import notes
from rft.run import launch
from tests.unit.test_config import grpo

GIVEN = "buffer.explorer_input"


def mixture(assets: Path, more: str) -> list[str]:
    """Overrides of two tasksets, the second of which agents run."""
    text = f"path:{assets / 'train.jsonl'},format:{{prompt_type:plaintext}}"
    return [
        f"{GIVEN}.taskset=null",
        f"{GIVEN}.tasksets=[{{{text}}},{{{text},default_workflow_type:agent,"
        f"workflow_args:{{{more}}}}}]",
    ]


def test_agents_of_a_mixture_have_the_api_and_are_checked(assets: Path, tmp_path: Path) -> None:
    (config,) = grpo(assets, tmp_path, *mixture(assets, "command:[cat]"))
    assert config.explorer.rollout_model.enable_openai_api
    with pytest.raises(ConfigError, match=r"tasksets\.1\.workflow_args: .* needs one of agent="):
        grpo(assets, tmp_path, *mixture(assets, ""))


def test_a_trainer_without_tasks_of_its_own_ends_with_the_data(
    assets: Path, tmp_path: Path
) -> None:
    """Which others store; the ranks read the config as it was checked."""
    alone = ["mode=train", f"{GIVEN}.taskset=null"]
    database = "buffer.trainer_input.experience_buffer.storage_type=sql"
    address = f"buffer.trainer_input.experience_buffer.path=sqlite:///{tmp_path / 'a.db'}"
    for words in (alone, [*alone, database, address]):
        (config,) = grpo(assets, tmp_path, *words)
        assert config.trainer.total_steps is None
        configs.save(config, tmp_path / "resolved.yaml")
        assert configs.load(tmp_path / "resolved.yaml") == config
        assert launch.describe(config).count("steps until the data ends") == 1


def test_one_start_tells_every_mistake_in_the_order_of_the_sections(
    assets: Path, tmp_path: Path
) -> None:
    mistakes = [
        "project=a//b",
        "trainer.checkpoint.storage=bucket",
        "algorithm.kl_loss_fn=k9",
        "explorer.reward_timeout=1e6",
        "model.max_model_len=99999",
        "synchronizer.receive=direct",
        "synchronizer.sync_method=checkpoint",
        f"{GIVEN}.taskset.path=gone.jsonl",
        "+monitor.monitor_args.uri=a",
        "cluster.ray_address=auto",
        "service.data_juicer.server_url=here",
    ]
    with pytest.raises(ConfigError) as refused:
        grpo(assets, tmp_path, *mistakes)
    told = [
        "project='a//b'",
        "algorithm.kl_loss_fn=k9",
        "model.max_model_len=99999",
        "cluster.ray_address=auto",
        f"{GIVEN}.taskset.path",
        "explorer.reward_timeout",
        "trainer.checkpoint.storage=bucket",
        "synchronizer.receive=direct",
        "monitor.monitor_args.uri",
        "service.data_juicer.server_url=here",
    ]
    problems = refused.value.problems
    assert len(problems) == len(told), problems
    assert all(key in problem for key, problem in zip(told, problems, strict=True)), problems


def test_what_builds_on_a_refused_value_is_not_told(assets: Path, tmp_path: Path) -> None:
    """Without the model's files nothing is said of lengths, layouts, templates or the data."""
    with pytest.raises(ConfigError) as refused:
        grpo(assets, tmp_path, f"model.model_path={tmp_path}", "trainer.num_ranks=3")
    assert len(refused.value.problems) == 1 and "config.json" in refused.value.problems[0]


def test_a_mistake_of_one_stage_names_it_and_one_of_all_is_told_once(
    assets: Path, tmp_path: Path
) -> None:
    stages = "+stages=[{stage_name:a,model:{max_model_len:99999}},{stage_name:b}]"
    with pytest.raises(ConfigError) as refused:
        grpo(assets, tmp_path, stages, "cluster.ray_address=auto")
    own, shared = refused.value.problems
    assert own.startswith("a: model.max_model_len=99999") and shared.startswith(
        "cluster.ray_address=auto"
    )


def test_rules_change_nothing_of_what_is_filled_in_any_order(assets: Path, tmp_path: Path) -> None:
    """W44, and a look at a config renames no run."""
    words = "continue_from_checkpoint=false", "trainer.save_interval=1"
    (config,) = grpo(assets, tmp_path, *words)
    (again,) = grpo(assets, tmp_path, *words)
    assert again == config
    for rules in (preflight.checks(at_start=False), preflight.checks(at_start=False)[::-1]):
        refusals = Refusals()
        refusals.ask(rules, config)
        assert not refusals.sentences() and config == again


def test_a_number_of_steps_that_nobody_reads_is_told(assets: Path, tmp_path: Path) -> None:
    three = "buffer.total_steps=3"
    for more, said in ((), 0), (("trainer.total_steps=3",), 0), (("trainer.total_steps=5",), 1):
        (config,) = grpo(assets, tmp_path, three, *more)
        assert sum("buffer.total_steps=3 is not read" in one for one in notes(config)) == said


def test_ports_and_addresses_are_asked_for_by_who_listens_there(
    assets: Path, tmp_path: Path
) -> None:
    """One file may be of an explorer and of a trainer that are started beside each other."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        api = ["explorer.rollout_model.enable_openai_api=true", f"explorer.proxy_port={port}"]
        master = f"cluster.master_port={port}"
        grpo(assets, tmp_path, "mode=train", *api)
        grpo(assets, tmp_path, "mode=explore", master)
        with pytest.raises(ConfigError, match=rf"^explorer.proxy_port={port} .*0 for any$"):
            grpo(assets, tmp_path, "mode=explore", *api)
        with pytest.raises(ConfigError, match=rf"^cluster.master_port={port} is in use"):
            grpo(assets, tmp_path, "mode=train", master)
    elsewhere = "explorer.listen_address=192.0.2.1"  # of no machine: RFC 5737
    with pytest.raises(ConfigError, match=r"^explorer.listen_address=192.0.2.1 .*machine's own"):
        grpo(assets, tmp_path, api[0], elsewhere)


def test_a_look_at_a_config_leaves_out_what_runs_or_asks_something(
    assets: Path, tmp_path: Path
) -> None:
    """The model and the rows are looked at; the user's reward, and a port, at a start only."""
    (config,) = grpo(assets, tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config.cluster.master_port = taken.getsockname()[1]
        taskset = config.buffer.explorer_input.taskset
        assert taskset is not None
        taskset.default_reward_fn_type = f"{tmp_path / 'gone.py'}:reward"
        preflight.check(config, at_start=False)
        with pytest.raises(ConfigError) as refused:
            preflight.check(config)
    assert [problem for problem in refused.value.problems if "is in use" in problem]
    assert [problem for problem in refused.value.problems if "gone.py" in problem]
    config.model.model_path = str(tmp_path)
    with pytest.raises(ConfigError, match="config.json"):
        preflight.check(config, at_start=False)
