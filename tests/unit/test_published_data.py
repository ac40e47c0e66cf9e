"""What published files give the data side: rows of any shape, names that are used twice, buffers
and models beside the run's own, arguments of losses, rewards and workflows. Each is looked at where
the part that uses it receives it.
"""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
import pyarrow.parquet
import pytest

from rft import config as configs
from rft import train
from rft.algorithm import mixing, recipe
from rft.config import (
    AlgorithmConfig,
    Config,
    ConfigError,
    ExperienceBufferConfig,
    FormatConfig,
    RowFormatConfig,
    TasksetConfig,
)
from rft.config import file as config_file
from rft.data.chat import render_prompt
from rft.data.runs import expanded
from rft.data.supervised import SupervisedRows, check_supervised
from rft.data.taskset import TaskDefaults, Taskset, check_taskset
from rft.extras.pipeline import tasks as task_pipeline
from rft.ground.experience import Sampling
from rft.preflight.rules_data import notes
from rft.rollout import workflows
from rft.run import assembly
from rft.tools.toy import character_tokenizer
from tests.unit.scripted import Pool, policy
from tests.unit.test_mixing import expert, feed, rollout

KEY = "buffer.explorer_input.taskset"
DEFAULTS = TaskDefaults("single_turn", "exact_match", 2, 8, 1.0)
ASKED = [{"role": "user", "content": "2+2="}]


def written(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


# --- rows -----------------------------------------------------------------------------------------

SHAPES: list[tuple[dict[str, Any], dict[str, Any], Any, str | None]] = [
    ({"q": "2+2=", "a": 4}, {"prompt_key": "q", "response_key": "a"}, "2+2=", "4"),
    ({"prompt": "2+2=", "response": "4"}, {"response_key": "response"}, "2+2=", "4"),
    ({"prompt": "2+2=", "response": "4"}, {}, "2+2=", "4"),
    ({"messages": ASKED, "response": "4"}, {}, ASKED, "4"),
    ({"messages": json.dumps(ASKED), "response": "4"}, {}, ASKED, "4"),
    (
        {"prompt": ASKED, "reward_model": {"ground_truth": "4"}},
        {"prompt_key": "prompt", "response_key": "reward_model.ground_truth"},
        ASKED,
        "4",
    ),
    ({"turns": [{"ask": "2+2="}], "a.b": "4"}, {"prompt_key": "turns.0.ask", "response_key": "a.b"})
    + ("2+2=", "4"),
    (
        {"q": ASKED, "response": "4"},
        {"prompt_key": "q", "system_prompt": "add"},
        [{"role": "system", "content": "add"}, *ASKED],
        "4",
    ),
]


@pytest.mark.parametrize(
    ("shape", "suffix"),
    [*((one, ".jsonl") for one in range(len(SHAPES))), (5, ".parquet")],
)
def test_a_task_is_read_from_rows_of_any_shape(tmp_path: Path, shape: int, suffix: str) -> None:
    row, form, prompt, truth = SHAPES[shape]
    path = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    else:
        written(path, row)
    config = TasksetConfig(path=str(path), format=FormatConfig(**form))
    assert check_taskset(config, f"{KEY}.path") == 1
    (task,) = Taskset(config, DEFAULTS)
    assert (task.prompt, task.truth) == (prompt, truth)


def test_rows_that_a_workflow_reads_itself_need_neither_prompt_nor_answer(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", {"seed": 3, "size": 4, "response": {"goal": True}})
    config = TasksetConfig(path=path)
    assert check_taskset(config, f"{KEY}.path", prompt=False, answer=False) == 1
    (task,) = Taskset(config, DEFAULTS)
    assert (task.prompt, task.truth, task.raw["size"]) == ("", '{"goal": true}', 4)
    with pytest.raises(ConfigError, match="taskset/0/0 has no prompt.*'seed', 'size'"):
        render_prompt(character_tokenizer(), task)
    for asks in ({"prompt": True}, {"prompt": False, "answer": True}):
        said = "format.prompt_key" if asks["prompt"] else "format.response_key"
        config.format = FormatConfig(prompt_type="plaintext")
        with pytest.raises(ConfigError, match=said):
            check_taskset(config, f"{KEY}.path", **{"answer": False, **asks})
    config.format = FormatConfig(response_key="response")  # of any kind, for a workflow of its own
    assert check_taskset(config, f"{KEY}.path", prompt=False, answer=False) == 1
    config.format = FormatConfig(prompt_key="game_file")  # named, so it is there
    with pytest.raises(ConfigError, match="has no 'game_file'"):
        check_taskset(config, f"{KEY}.path", prompt=False, answer=False)


def test_rows_of_a_buffer_may_be_in_a_subset(tmp_path: Path) -> None:
    (tmp_path / "math").mkdir()
    written(tmp_path / "math" / "train.jsonl", {"ask": {"q": "1+1="}, "a": "2"})
    (tmp_path / "code").mkdir()
    written(tmp_path / "code" / "train.jsonl", {"ask": {"q": "3+3="}, "a": "6"})
    config = ExperienceBufferConfig(
        storage_type="file",
        path=str(tmp_path),
        subset_name="math",
        format=RowFormatConfig(prompt_key="ask.q", response_key="a"),
    )
    assert check_supervised(config, "buffer.path") == 1
    rows = SupervisedRows(config, character_tokenizer(), 1, 0, 64, epochs=1)
    made = rows.take(0).experiences[0]
    assert rows.num_rows == 1
    assert "1+1=" in character_tokenizer().decode(made.tokens.tolist())


def test_target_fields_keep_what_operators_make() -> None:
    given = configs.TaskPipelineConfig(
        operators=[configs.OperatorConfig("rate", {"chosen_key": "chosen", "poll": "b"})],
        target_fields=["prompt"],
    )
    row = {"prompt": "p", "chosen": "c", "a": "x", "b": "y"}
    made = task_pipeline.named_columns(given)
    assert task_pipeline._kept(row, 0, given.target_fields, made) == {"prompt": "p", "chosen": "c"}


# --- a whole file ---------------------------------------------------------------------------------

FILE = """
project: mine
name: data
algorithm:
  algorithm_type: mix_chord
  repeat_times: 8
  kl_loss_fn: none
  kl_loss_fn_args: {kl_coef: 0.0}
  sample_strategy_args: {expert_data_ratio: 0.2}
  policy_loss_fn_args:
    enable_phi_function: false
    sft_loss_agg_mode: seq-mean-token-mean
    use_dynamic_bsz: true
    ppo_mini_batch_size: 320
    ppo_micro_batch_size_per_gpu: 4
    ngpus_trainer: 4
    train_batch_size_expert: 4
    train_batch_size_usual: 16
model:
  model_path: MODEL
  chat_template_path: None
  max_prompt_tokens: 24
  max_response_tokens: 8
  lora_configs:
    - {name: lora, lora_rank: 4, lora_alpha: 4, target_modules: all-linear}
buffer:
  batch_size: 2
  train_batch_size: 20
  explorer_input:
    taskset: &sums
      name: sums
      path: ROOT/train.jsonl
      enable_progress_bar: true
      data_selector: {selector_type: random}
      format: {prompt_key: prompt, response_key: response}
    eval_tasksets: [*sums]
  trainer_input:
    auxiliary_buffers:
      sft_dataset: &rows
        storage_type: file
        schema_type: sft
        total_epochs: 25
        enable_progress_bar: false
        path: ROOT/train.jsonl
        format: {prompt_type: plaintext}
      more: *rows
explorer:
  auxiliary_models:
    - &judge {model_path: MODEL, max_prompt_tokens: 12, max_response_tokens: 6}
    - *judge
"""


def prepared(root: Path, assets: Path, text: str, *overrides: str) -> Config:
    file = root / "run.yaml"
    words = text.replace("MODEL", str(assets / "model")).replace("ROOT", str(assets))
    file.write_text(words, encoding="utf-8")
    given = ["--config", str(file), "device=cpu", f"checkpoint_root_dir={root}", *overrides]
    arguments = config_file.registered(given)
    (config,) = train.prepared_stages(configs.compose(arguments))
    return config


def test_a_whole_file_is_taken_and_says_what_means_less_here(
    assets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = prepared(tmp_path, assets, FILE)
    assert config.model.chat_template_path is None and config.model.lora_configs[0].lora_rank == 4
    given = config.buffer.explorer_input
    assert given.taskset is not None and given.taskset.task_selector.selector_type == "random"
    assert [given.taskset.name, given.eval_tasksets[0].name] == ["sums", "sums@eval"]
    judges = config.explorer.auxiliary_models
    assert [one.name for one in judges] == ["model", "model-2"]
    assert [one.max_model_len for one in judges] == [18, 18]
    rows = assembly.experts(config, character_tokenizer(), 91)
    assert isinstance(rows, SupervisedRows)
    assert rows.batch_size == 4 and rows.total_steps == 25 * rows.steps_per_epoch
    said = [*notes(config)]
    assert len(said) == 3, said
    for one, words in zip(
        said, ("ngpus_trainer", "auxiliary_buffers.more is not read", "sums@eval"), strict=True
    ):
        assert words in one
    heard = capsys.readouterr().err
    for words in ("chat_template_path=None", "enable_progress_bar=True", "lora_configs.0.name"):
        assert words in heard


WRONG = (
    {
        "train_batch_size_expert: 4": ("train_batch_size_expert: 5", "there are 4"),
        "schema_type: sft": ("schema_type: dpo", "expert rows are of sft"),
        "max_prompt_tokens: 12": ("max_prompt_tokens: 60", "max_model_len"),
        "path: ROOT/train.jsonl\n      enable": (
            "path: ROOT/train.jsonl\n      workflow_args: {nonsense: 1}\n"
            "      default_reward_fn_type: math_dapo\n"
            "      reward_fn_args: {penalty_facto: 1, penalty_factor: a}\n      enable",
            "nonsense: workflow .* it takes none",
        ),
        "penalty_facto": ("penalty_facto", "did you mean `penalty_factor`"),
        "penalty_factor: a": (
            "penalty_factor: a",
            "penalty_factor='a': give a value of type float",
        ),
    },
    {
        "enable_phi": ("enable_fi", "enable_fi_function is unknown"),
        "mode: seq-mean-token-mean": ("mode: mean", "sft_loss_agg_mode=mean is unknown"),
        "{kl_coef: 0.0}": ("{kl_coef: 0.1}", "there is no such term"),
    },
)


@pytest.mark.parametrize("faults", WRONG)
def test_what_contradicts_is_refused_all_at_once(
    assets: Path, tmp_path: Path, faults: dict[str, tuple[str, str]]
) -> None:
    text = FILE
    for old, (new, _) in faults.items():
        assert old in text
        text = text.replace(old, new)
    with pytest.raises(ConfigError) as refused:
        prepared(tmp_path, assets, text)
    for _, said in faults.values():
        assert any(re.search(said, one) for one in refused.value.problems), (
            said,
            str(refused.value),
        )


def test_buffers_beside_an_algorithm_that_reads_none_are_said(assets: Path, tmp_path: Path) -> None:
    algorithm = FILE[FILE.index("algorithm:") : FILE.index("model:")]
    text = FILE.replace(algorithm, "algorithm: {algorithm_type: grpo, repeat_times: 10}\n")
    said = [*notes(prepared(tmp_path, assets, text))]
    assert [one for one in said if "takes rollouts only" in one] == said[:2]


# --- losses and their rows ------------------------------------------------------------------------


def mixed(**arguments: Any) -> AlgorithmConfig:
    return AlgorithmConfig(
        algorithm_type="mix",
        policy_loss_fn="mix",
        policy_loss_fn_args={"mu": 0.5, **arguments},
        advantage_fn="grpo",
        loss_agg_mode="token-mean",
        sample_strategy="mix",
    )


def test_rollouts_and_expert_rows_have_ways_of_their_own_to_become_one_number() -> None:
    batch = [rollout(1.0, 1), rollout(0.0, 3), expert(2), expert(6)]
    counts = dict.fromkeys(mixing.COUNTS, 7)

    def weights(**arguments: Any) -> list[float]:
        _, rows = mixing.rows(list(batch), mixed(**arguments), 0)
        return [float(expanded(row.weight).max()) for row in rows]

    assert weights(**counts) == pytest.approx([1 / 4, 1 / 4, 1 / 8, 1 / 8])
    each = "seq-mean-token-mean"
    assert weights(sft_loss_agg_mode=each) == pytest.approx([1 / 4, 1 / 4, 1 / 4, 1 / 12])
    assert weights(grpo_loss_agg_mode=each) == pytest.approx([1 / 2, 1 / 6, 1 / 8, 1 / 8])
    assert recipe.loss_arguments(mixed(**counts, loss_agg_mode="token-mean")) == {"mu": 0.5}


def test_a_run_ends_with_the_passes_over_its_expert_rows(tmp_path: Path) -> None:
    feeding = feed(tmp_path / "rows.jsonl")
    assert isinstance(feeding.experts, SupervisedRows)
    feeding.experts.total_steps = 2
    assert [feeding.next(step, False) is not None for step in range(3)] == [True, True, False]
    assert feeding.current is None, "nothing was leased for the step that is not"


# --- models and workflows -------------------------------------------------------------------------


def test_an_auxiliary_model_has_lengths_of_its_own() -> None:
    pool = Pool(lambda prompt, number: "fine")
    judge = policy(pool, name="judge")
    judge.max_prompt, judge.max_response = 40, 6

    def say(text: str, tokens: int) -> str:
        asked = [{"role": "user", "content": text}]
        return asyncio.run(judge.say("r", asked, Sampling(max_tokens=tokens)))

    assert say("a", 0) == "fine" and say("a", 3) == "fine"
    assert [one.sampling.max_tokens for one in pool.asked] == [6, 3]
    with pytest.raises(ValueError, match="maximum prompt length is 40 tokens"):
        say("a" * 60, 0)


def test_every_workflow_of_ours_says_which_arguments_it_reads() -> None:
    for name in workflows.WORKFLOWS:
        flow = workflows.resolve(name)
        if name != "agent":  # AgentSettings says it
            assert isinstance(getattr(flow, "ARGUMENTS", None), dict), name
            for kind in flow.ARGUMENTS.values():  # type: ignore[attr-defined]
                msgspec.inspect.type_info(kind)


def test_a_workflow_of_the_user_reads_what_it_likes(assets: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from rft.rollout.workflows import MultiTurn\n"
        "class Free(MultiTurn): pass\n"
        "class Said(MultiTurn):\n    ARGUMENTS = {'hint': str}\n"
    )
    name = "name: sums\n      default_workflow_type: {}\n      workflow_args: {}"
    free, said = (f"{tmp_path}/own.py:{word}" for word in ("Free", "Said"))
    text = FILE.replace("name: sums", name.format(free, "{anything: 1}"))
    assert prepared(tmp_path, assets, text).buffer.explorer_input.taskset is not None
    text = FILE.replace("name: sums", name.format(said, "{hnt: a, hint: 1}"))
    with pytest.raises(
        ConfigError, match="did you mean `hint`.*\n.*hint=1: give a value of type str"
    ):
        prepared(tmp_path, assets, text)
