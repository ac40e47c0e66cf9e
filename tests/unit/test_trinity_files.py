"""Files of Trinity-RFT in the shape of the published ones pass all checks, and what they say
reaches engines, templates and parsers. Single keys: tests/unit/test_trinity_keys.py.

`RFT_TRINITY_FILES=DIR` runs the checks over every file of a directory too, with local models and
data in the places of its hub names.
"""

import asyncio
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rft import config as configs
from rft import train
from rft.agents.endpoint.chat_format import Asked, answer_message
from rft.agents.endpoint.parsers import Parser
from rft.config import Config, ConfigError, ModelConfig, RolloutModelConfig
from rft.config import file as config_file
from rft.config import verl as verl_keys
from rft.config.file import Flat
from rft.config.trinity_flows import REFUSED
from rft.data.chat import load_tokenizer, render_messages, row_prompt
from rft.ground.errors import Late
from rft.ground.experience import Sampling, Task
from rft.rollout import workflows
from rft.rollout.engine import RolloutEngine
from rft.rollout.workflows.judges import Ruler
from rft.rollout.workflows.maths import MathThink
from rft.tools.toy import write_model

JUDGE = "explorer.auxiliary_models"
EVERYTHING = """
name: a
checkpoint_root_dir: runs
model: {model_path: m, max_model_len: 64}
buffer: {batch_size: 2, explorer_input: {taskset: {path: a, name: b}}}
trainer: {megatron: {tensor_model_parallel_size: 2}}
explorer: {auxiliary_models: [{name: judge, model_path: judge}]}
"""


def taken(tmp_path: Path, raw: dict[str, Any]) -> Flat:
    OmegaConf.save(OmegaConf.create(raw), tmp_path / "run.yaml")
    return Flat(str(tmp_path / "run.yaml"))


def received(found: Flat) -> Config:
    return configs.parsed(OmegaConf.to_container(OmegaConf.create(found.config), resolve=True))  # type: ignore[arg-type]


def at(config: Any, key: str) -> Any:
    for word in key.split("."):
        config = config[0] if isinstance(config, list) else config
        config = config[word] if isinstance(config, dict) else getattr(config, word)
    return config


def put(raw: dict[str, Any], key: str, value: Any) -> None:
    node: Any = raw
    *sections, word = key.split(".")
    for section in sections:
        node = (node[0] if isinstance(node, list) else node).setdefault(section, {})
    (node[0] if isinstance(node, list) else node)[word] = value


ENGINE = {  # a key there: the argument of vLLM that it becomes, off its default
    "seed": ("seed", 7),
    "dtype": ("dtype", "float32"),
    "enable_chunked_prefill": ("enable_chunked_prefill", False),
    "enable_prefix_caching": ("enable_prefix_caching", False),
    "enforce_eager": ("enforce_eager", True),
    "tensor_parallel_size": ("tensor_parallel_size", 2),
    "extra_engine_args": ("block_size", {"block_size": 32}),
    "enable_log_requests": ("enable_log_requests", True),
}


@pytest.mark.parametrize("section", ["explorer.rollout_model", JUDGE])
def test_engines_are_started_with_what_the_file_says(tmp_path: Path, section: str) -> None:
    raw: Any = OmegaConf.to_container(OmegaConf.create(EVERYTHING))
    for word, (_, value) in ENGINE.items():
        put(raw, f"{section}.{word}", value)
    found = taken(tmp_path, raw)
    assert not found.problems
    rollout = at(received(found), section)
    rollout = rollout[0] if isinstance(rollout, list) else rollout
    engine = RolloutEngine("engine_0", ModelConfig(model_path="m"), rollout, 1, 0, "cpu", 64)
    arguments = engine._arguments() | rollout.engine_args
    wanted = {name: value for name, value in ENGINE.values()} | {"block_size": 32}
    assert {name: arguments[name] for name in wanted} == wanted
    left_out = RolloutModelConfig()
    other = RolloutEngine("engine_0", ModelConfig(model_path="m"), left_out, 1, 3, "cpu", 64)
    assert other._arguments()["seed"] == 3, "that of the run"


@pytest.mark.parametrize("thinks", [True, False, None])
def test_whether_a_model_thinks_reaches_its_template(
    tmp_path: Path, assets: Path, thinks: bool | None
) -> None:
    raw: Any = OmegaConf.to_container(OmegaConf.create(EVERYTHING))
    put(raw, "explorer.rollout_model.enable_thinking", thinks)
    model = received(taken(tmp_path, raw)).model
    assert model.enable_thinking is thinks
    model.model_path = str(assets / "model")
    template = "a{{ enable_thinking if enable_thinking is defined else 'unsaid' }}"
    tokenizer = load_tokenizer(model)
    ids = render_messages(tokenizer, [{"role": "user", "content": "a"}], template)
    said = "unsaid" if thinks is None else str(thinks)
    assert ids == list(tokenizer.encode(f"a{said}", add_special_tokens=False))


@pytest.mark.verify
def test_calls_are_read_by_vllms_own_parser(assets: Path) -> None:
    """Importing vLLM takes ten seconds."""
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    asked = Asked("m", Sampling(), [{"role": "user", "content": "a"}], tools=[tool])
    tokenizer = load_tokenizer(ModelConfig(model_path=str(assets / "model")))
    ids = tokenizer.encode("[add(a=1)]", add_special_tokens=False)
    parsed = Parser(tokenizer, "pythonic", None)(ids, asked)
    (call,) = answer_message("[add(a=1)]", True, "call", parsed)["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert "tool_calls" not in answer_message("[add(a=1)]", True, "call"), "by rft's own rules"


# --- whole files ----------------------------------------------------------------------------------

PUBLISHED = [
    file
    for file in sorted(Path(os.environ.get("RFT_TRINITY_FILES", "/nowhere")).glob("*.yaml"))
    if "model_path:" in file.read_text(encoding="utf-8")  # others are recipes of Data-Juicer
]
OURS = [Path(__file__).parent / "flat" / "published.yaml"]
# what a file may be refused for, beside what is not here: a service, images, a closed workflow
CLOSED = "|".join(f"={name}: " for name in REFUSED)
ALLOWED = re.compile(f"Data-Juicer|data_juicer|image|{CLOSED}|tinker", re.IGNORECASE)
ROW = {"question": "1 + 1?", "prompt": "1 + 1?", "answer": "2", "response": "2", "solution": "2"}
MESSAGES = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]


def columns(raw: Any) -> dict[str, Any]:
    """A row with every column that the file names, of the kind that its name says."""
    found: dict[str, Any] = dict(ROW)

    def look(node: Any) -> None:
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            if key == "feature_keys":
                found.update(dict.fromkeys(value, 0.5))
            elif isinstance(value, dict | list):
                look(value)
            elif str(key).endswith("_key") and value:
                first, *inside = str(value).split(".")
                said: Any = MESSAGES if key == "messages_key" else "2"
                for word in reversed(inside):
                    said = {word: said}
                found[first] = said

    look(raw)
    return found | {"messages": MESSAGES, "message": MESSAGES}


def local(file: Path, root: Path) -> Path:
    """The file with local models and data in the places of names of a hub."""
    raw: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    rows = root / "rows"
    for split in ("train", "test", "validation"):
        (rows / split).mkdir(parents=True, exist_ok=True)
    row = json.dumps(columns(raw))
    (rows / "rows.jsonl").write_text(f"{row}\n" * 400, encoding="utf-8")

    def put_here(node: Any) -> None:
        for key, value in list(node.items()) if isinstance(node, dict) else enumerate(node):
            if key == "inputs":
                node[key] = [str(rows / "rows.jsonl")]
            elif isinstance(value, dict | list):
                put_here(value)
            elif key in ("model_path", "critic_model_path") and value:
                node[key] = str(root / "model")
            elif key == "checkpoint_root_dir":
                node[key] = str(root / "runs")
            elif key == "path" and value and "://" not in str(value):
                node[key] = str(rows / "rows.jsonl")

    put_here(raw)
    if raw.get("data_processor", {}).get("task_pipeline"):  # its rows go where they are read
        for section, name in (
            ("explorer_input", "taskset"),
            ("trainer_input", "experience_buffer"),
        ):
            if reader := raw["buffer"].get(section, {}).get(name):
                reader["path"] = str(root / "made.jsonl")
    OmegaConf.save(OmegaConf.create(raw), root / file.name)
    return root / file.name


@pytest.mark.parametrize("file", [*OURS, *PUBLISHED], ids=lambda file: file.stem)
def test_a_published_file_passes_all_checks(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    write_model(
        tmp_path / "model",
        **dict(hidden=64, layers=4, heads=4, kv_heads=2, head_dim=16, ffn=128, context=40960),
    )
    words = ["--config", str(local(file, tmp_path)), "device=cpu", "cluster.gpu_per_node=null"]
    try:
        words, told = config_file.read_file(words)
        raw, told = configs.drafted(words, told)
        train.prepared_stages(raw, told)
    except ConfigError as error:
        wrong = [one for one in config_file.located(error).problems]
        refused = [one for one in wrong if not (isinstance(one, Late) or ALLOWED.search(one))]
        assert refused == [] and file not in OURS


# --- what several keys say together ---------------------------------------------------------------


def started(tmp_path: Path, raw: dict[str, Any]) -> list[str]:
    """What a start says is wrong with a file."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(ROW) + "\n", encoding="utf-8")
    put(raw, f"{configs.TASKSET_KEY}.path", str(rows))
    OmegaConf.save(OmegaConf.create(raw), tmp_path / "run.yaml")
    try:
        words, told = config_file.read_file(["--config", str(tmp_path / "run.yaml"), "device=cpu"])
        train.prepared_stages(*configs.drafted(words, told))
    except ConfigError as error:
        return list(error.problems)
    return []


@pytest.mark.parametrize("said", [{"algorithm_type": "grppo"}, {"sample_strategy": "mixx"}])
def test_a_wrong_type_hides_no_other_wrong_name(tmp_path: Path, said: dict[str, str]) -> None:
    raw: Any = OmegaConf.to_container(OmegaConf.create(EVERYTHING))
    wrong = ("policy_loss_fn", "advantage_fn", "kl_loss_fn", "entropy_loss_fn")
    raw["algorithm"] = {"algorithm_type": "grpo", **dict.fromkeys(wrong, "nobodys"), **said}
    put(raw, f"{configs.TASKSET_KEY}.default_workflow_type", "nobodys")
    told = " ".join(started(tmp_path, raw))
    for name, value in (*said.items(), *dict.fromkeys(wrong, "nobodys").items()):
        assert f"algorithm.{name}={value} is unknown" in told
    assert "unknown workflow 'nobodys'" in told


def test_what_a_buffer_that_is_not_read_names_has_to_be_there(tmp_path: Path) -> None:
    raw: Any = OmegaConf.to_container(OmegaConf.create(EVERYTHING))
    raw["algorithm"] = {"algorithm_type": "grpo", "repeat_times": 2}
    beside = {"one": {"storage_type": "file", "path": "/nowhere/a.jsonl"}, "two": {}}
    put(raw, "buffer.trainer_input.auxiliary_buffers", beside)
    told = " ".join(started(tmp_path, raw))
    assert "auxiliary_buffers.one.path: /nowhere/a.jsonl does not exist" in told
    assert "auxiliary_buffers.two.path is not set" in told


def test_the_teacher_is_no_auxiliary_model_any_more(tmp_path: Path) -> None:
    raw: Any = OmegaConf.to_container(OmegaConf.create(EVERYTHING))
    put(raw, "algorithm.algorithm_type", "on_policy_distill")
    found = taken(tmp_path, raw)
    assert received(found).model.teacher_model_path == "judge"
    assert received(found).explorer.auxiliary_models == []
    assert "model.teacher_model_path" in {one.place for one in found.taken}


def a_task(**given: Any) -> Task:
    return Task(
        **({"id": "a", "taskset": "a", "row": 0, "prompt": "a", "sampling": Sampling()} | given)
    )


def test_an_empty_system_prompt_is_none_at_all() -> None:
    """Not even that of a workflow; of rows to learn it is one without words."""
    form = configs.FormatConfig(prompt_key="question", system_prompt="")
    said = [{"role": "user", "content": "1 + 1?"}]
    prompt = row_prompt(ROW, form)
    task = a_task(prompt=prompt, reward="math_reward")
    assert prompt == said == MathThink().asked(task).prompt
    rows = configs.RowFormatConfig(prompt_key="question", system_prompt="")
    assert row_prompt(ROW, rows) == [{"role": "system", "content": ""}, *said]


@pytest.mark.parametrize("given, most", [({}, 0), ({"judge_tokens": 9}, 9)])
def test_a_judge_says_as_much_as_its_model_may(given: dict[str, int], most: int) -> None:
    """0 is the model's max_response_tokens, else what its length leaves (`served_models.Model`)."""
    asked: list[Sampling] = []

    class Asks:
        async def ask(self, messages: Any, model: str, sampling: Sampling) -> str:
            asked.append(sampling)
            return ""

    task = a_task(workflow_args=given)
    asyncio.run(Ruler().said(task, Asks(), "which?"))  # type: ignore[arg-type]
    assert asked[0].max_tokens == most


@pytest.mark.parametrize(
    "args, most",
    [
        ({"environment": "gymnasium", "max_step_num": 5}, 2),
        ({"environment": "gymnasium", "max_step_num": 5, "per_turn": True}, 10),
        ({"environment": "gymnasium", "per_turn": True}, 16),
        ({"environment": "verifiers"}, None),  # it asks as often as it likes
    ],
)
def test_a_step_counts_as_many_experiences_as_an_environment_may_make(
    args: dict[str, Any], most: int | None
) -> None:
    task = a_task(workflow="environment", workflow_args=args, repeat_times=2)
    assert workflows.most(task) == most


# --- what a class says where its defaults are not asked -------------------------------------------

PAIRS = """
  train_batch_size: 64
  trainer_input: {experience_buffer: {storage_type: file, path: pairs.jsonl}}
"""


def meant(tmp_path: Path, text: str, *words: str) -> Flat:
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    found = Flat(str(tmp_path / "run.yaml"), words)
    assert found.problems == []
    return found


def test_a_batch_of_pairs_is_counted_in_experiences(tmp_path: Path) -> None:
    """A step has so many pairs there, and an update half of them."""
    dpo = "algorithm: {algorithm_type: dpo}\n"
    alone = meant(tmp_path, f"{dpo}buffer:{PAIRS}")
    assert alone.config["buffer"]["train_batch_size"] == 128
    assert alone.config["trainer"]["ppo_mini_batch_size"] == 64
    assert any(one.place == "buffer.train_batch_size" for one in alone.notes)
    stage = "".join(f"    {line}\n" for line in f"{dpo}buffer:{PAIRS}".splitlines())
    text = f"buffer: {{train_batch_size: 32}}\nstages:\n  - stage_name: pairs\n{stage}"
    staged = meant(tmp_path, text).config
    [first] = staged["stages"]
    assert first["buffer"]["train_batch_size"] == 128 and staged["buffer"]["train_batch_size"] == 32
    assert first["trainer"] == {"ppo_mini_batch_size": 64}
    assert "ppo_mini_batch_size" not in staged["trainer"]
    typed = meant(tmp_path, f"buffer:{PAIRS}", "algorithm.algorithm_type=dpo").config
    assert typed["buffer"]["train_batch_size"] == 128, "the command line's algorithm wins"
    own = meant(tmp_path, f"defaults: rft\n{dpo}buffer:{PAIRS}").config
    assert own["buffer"]["train_batch_size"] == 64 and "trainer" not in own


def test_dpo_has_a_kl_term_whatever_is_said(tmp_path: Path) -> None:
    text = "algorithm: {algorithm_type: %s, kl_loss_fn: none}\n"
    assert meant(tmp_path, text % "dpo").config["algorithm"]["kl_loss_fn"] == "k2"
    assert meant(tmp_path, text % "grpo").config["algorithm"]["kl_loss_fn"] == "none"


def test_a_stage_s_own_mode_says_how_it_gets_weights(tmp_path: Path) -> None:
    text = (
        "stages:\n  - {stage_name: apart, mode: train, synchronizer: {sync_method: nccl}}\n"
        "  - {stage_name: whole, synchronizer: {sync_method: nccl}}\n"
    )
    apart, whole = meant(tmp_path, text).config["stages"]
    assert "sync_method" not in apart.get("synchronizer", {})
    assert whole["synchronizer"]["sync_method"] == "nccl"


def test_a_section_of_a_stage_has_their_defaults(tmp_path: Path) -> None:
    """Not rft's, and not the file's own: that section is as if it were not there."""
    own = "{algorithm_type: grpo, kl_loss_fn: none, optimizer: {lr_scheduler_type: cosine}}"
    text = (
        f"algorithm: {own}\nexplorer: {{eval_interval: 7}}\n"
        f"stages:\n  - {{stage_name: one, algorithm: {own}, explorer: {{runner_per_model: 2}}}}\n"
        "  - {stage_name: two, algorithm: {algorithm_type: ppo}}\n"
        "  - {stage_name: three, algorithm: {algorithm_type: gspo}}\n"
    ).replace(
        "kl_loss_fn", "policy_loss_fn_args: {loss_agg_mode: seq-mean-token-sum}, kl_loss_fn", 1
    )
    found = meant(tmp_path, text).config
    one, two, three = found["stages"]
    assert one["algorithm"]["optimizer"] == found["algorithm"]["optimizer"]
    assert one["algorithm"]["optimizer"]["min_lr_ratio"] == 0.01
    assert one["explorer"]["eval_interval"] == 100 and "explorer" not in two
    assert two["algorithm"]["optimizer"]["min_lr_ratio"] == 0.01
    assert two["algorithm"]["kl_loss_fn"] is None
    assert three["algorithm"]["loss_agg_mode"] == "token-mean"


def test_arguments_that_are_called_otherwise(tmp_path: Path) -> None:
    def arguments(kind: str, name: str, given: dict[str, Any]) -> Any:
        text = json.dumps({"algorithm": {"algorithm_type": kind, f"{name}_args": given}})
        return meant(tmp_path, text).config["algorithm"][f"{name}_args"]

    loss, advantage = "policy_loss_fn", "advantage_fn"
    assert arguments("cispo", loss, {"enable_mask_clip": True}) == {"enable_mask": True}
    assert arguments("ppo", loss, {"delta_sequence_masking": 0.2}) == {"delta": 0.2}
    states = {"omega": 0.5, "step_reward_key": "step_reward"}
    assert arguments("gigpo", advantage, states) == {"omega": 0.5}
    assert arguments("jsd", advantage, {"temperature": 1.0, "chunk_size": 64}) == {}
    assert arguments("jsd", advantage, {"temperature": 0.5}) == {"temperature": 0.5}, "refused"
    primes = {"epsilon_low_prime": 0.4, "epsilon_high_prime": 0.4}
    ring = {"clip_mode": "ring"}
    assert arguments("rec", loss, ring) == ring | primes
    assert arguments("rec", loss, ring | {"epsilon_low_prime": 0.6})["epsilon_low_prime"] == 0.6
    usual = meant(tmp_path, "algorithm: {algorithm_type: rec}\n").config["algorithm"]
    assert "policy_loss_fn_args" not in usual and "loss_agg_mode" not in usual


def test_a_mask_of_whole_responses_brings_its_mean_of_responses(tmp_path: Path) -> None:
    def mean(**given: Any) -> Any:
        text = json.dumps({"algorithm": {"algorithm_type": "rec", "policy_loss_fn_args": given}})
        return meant(tmp_path, text).config["algorithm"].get("loss_agg_mode")

    assert mean(clip_mode="gspo-one-side") == "seq-mean-token-mean"
    assert mean(clip_mode="one-side") is None
    assert mean(clip_mode="gspo-one-side", loss_agg_mode="token-mean") is None, "said"


@pytest.mark.parametrize(
    ("block", "there"),
    [
        ("{}", True),
        ("{model: {enable_gradient_checkpointing: false}}", False),
        ("{actor_rollout_ref: {model: {enable_gradient_checkpointing: false}}}", False),
        (
            "{actor: {megatron: {override_transformer_config: {recompute_granularity: full}}}}",
            False,
        ),
    ],
)
def test_activations_are_computed_again_as_there(tmp_path: Path, block: str, there: bool) -> None:
    found = meant(tmp_path, f"trainer: {{trainer_config: {block}}}\n")
    assert (found.config["trainer"].get("recompute_granularity") == "full") is there


def test_a_block_may_leave_the_first_section_out(tmp_path: Path) -> None:
    """As files since 0.6 do."""
    text = (
        "trainer:\n  trainer_config:\n    actor: {optim: {weight_decay: 0.1}, strategy: fsdp2}\n"
        "    critic: {fsdp: {param_offload: true}}\n    ref: {strategy: ddp}\n"
    )
    block = meant(tmp_path, text).config["trainer"]["trainer_config"]
    found = verl_keys.of_block(block)
    assert found.values == {"algorithm.optimizer.weight_decay": 0.1}
    [told] = found.problems
    assert told.sentence.startswith("trainer.trainer_config.ref.strategy=ddp is refused")
    assert any("trainer_config.critic.fsdp.param_offload" in one.place for one in found.notes)
    bad = {"actor": {"grad_clip": 0.5, "optim": {"clip_grad": 1.0}}}
    [clash] = verl_keys.of_block(bad).problems
    assert "trainer.trainer_config.actor.grad_clip" in clash.sentence
