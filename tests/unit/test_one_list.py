"""One start tells every problem of a config, in types, names, bounds, rules and inputs, and ends
with exit code 2.
"""

import subprocess
import sys
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rft import config as configs
from rft import preflight, train
from rft.config import Config, ConfigError, Draft
from rft.ground.errors import problems_of
from rft.preflight.rules import Refusals, Rule, of_taskset
from rft.tools import studio
from tests.unit.test_config import grpo, of_grpo

TASKSET = "buffer.explorer_input.taskset"
PLAIN = "buffer: {explorer_input: {taskset: {format: {prompt_type: plaintext}}}}\n"
WRONG = {  # a word, and the sentence about it
    "explorer.eval_interval=often": "explorer.eval_interval=often: give a whole number",  # a type
    "trainer.gradclip=1": "unknown key `trainer.gradclip`; did you mean `trainer.grad_clip`?",
    "buffer.batch_size=0": "buffer.batch_size=0: must be greater than 0",  # a bound
    "monitor.monitor_type=tensorbord": "did you mean `tensorboard`?",  # a name
    "explorer.reward_timeout=1e6": "explorer.reward_timeout=1e+06 is longer than max_timeout",
    "trainer.megatron.tensor_model_parallel_size=8": "does not divide the model's 4 attention",
    f"{TASKSET}.path=gone.jsonl": f"{TASKSET}.path: gone.jsonl does not exist",
    "algorithm.optimizer.lr_warmup_steps_ratio=2": "a share must be between 0 and 1",
    "algorithm.kl_loss_fn=k9": "algorithm.kl_loss_fn=k9 is unknown",
    "synchronizer.lora_sync=adapter": "the policy has no adapter",
}


def words(assets: Path, tmp_path: Path, *overrides: str) -> list[str]:
    return [*of_grpo(assets), f"checkpoint_root_dir={tmp_path}", *overrides]


def problems(given: list[str]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as refused:
        train.prepared_stages(configs.compose(train.readable(given)))
    return refused.value.problems


def test_one_start_tells_problems_of_every_kind(assets: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "rft.train",
            *words(assets, tmp_path, "trainer.total_steps=5", *WRONG),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    first, *told = done.stderr.splitlines()
    assert first == f"rft: config refused, {len(WRONG)} problems:"
    for said in WRONG.values():
        assert len([line for line in told if said in line]) == 1, said


def test_what_depends_on_a_key_that_cannot_be_read_is_not_told(
    assets: Path, tmp_path: Path
) -> None:
    """With their defaults in place of them these would be refused for other keys."""
    pair = ["explorer.reward_timeout=1000", "explorer.max_timeout=long"]
    assert problems(words(assets, tmp_path, *pair)) == ("explorer.max_timeout=long: give a number",)
    with pytest.raises(ConfigError, match="reward_timeout=1000 is longer"):
        grpo(assets, tmp_path, pair[0])
    misspelt = ["explorer.reward_timeout=1000", "explorer.max_timout=2000"]
    (said,) = problems(words(assets, tmp_path, *misspelt))
    assert "did you mean `explorer.max_timeout`" in said
    (said,) = problems(words(assets, tmp_path, "+checkpoint_root_dir=${oc.env:NOT_SET_HERE}"))
    assert "NOT_SET_HERE" in said


def test_problems_of_stages_and_rules_are_one_list(assets: Path, tmp_path: Path) -> None:
    stages = (
        "stages=[{stage_name:a,trainer:{num_ranks:x},seed:1},"
        "{stage_name:b,trainer:{num_ranks:1,profile_ranks:[3]},seed:2}]"
    )
    given = words(assets, tmp_path, stages, "cluster.ray_address=auto")
    of_the_stage, of_all, of_b = problems(given)
    assert of_the_stage == "stages: trainer.num_ranks=x: give a whole number"
    assert of_all.startswith("cluster.ray_address=auto")
    assert of_b.startswith("b: trainer.profile_ranks=[3]"), "the other stage can be read"
    assert "every stage for itself" in problems([*given, "seed=3"])[0]


def test_a_file_its_overrides_and_the_rules_are_one_list(assets: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    text = "trainer: {num_ranks: x, param_offload: true}\ncluster: {ray_address: auto}\n"
    file.write_text("defaults: rft\n" + PLAIN + text, encoding="utf-8")
    given = words(assets, tmp_path, "log.level=info")[1:]
    told = problems(["--config", str(file), *given])
    assert [said.startswith(str(file)) for said in told] == [True, True, False, False]
    for said, key in zip(
        told, ("param_offload", "num_ranks", "log.level", "cluster.ray_address"), strict=True
    ):
        assert key in said


def test_data_are_looked_at_without_a_model(assets: Path, tmp_path: Path) -> None:
    gone = f"buffer.explorer_input.eval_tasksets=[{{path:{tmp_path}/b.jsonl}}]"
    given = ["model.model_path=/nowhere", f"{TASKSET}.path={tmp_path}/a.jsonl", gone]
    told = problems(words(assets, tmp_path, *given))
    assert [said.partition(":")[0].partition("=")[0] for said in told] == [
        "model.model_path",
        f"{TASKSET}.path",
        "buffer.explorer_input.eval_tasksets.0.path",
    ]


def test_nothing_is_prepared_of_what_cannot_be_read(tmp_path: Path) -> None:
    given = ["experiment=quickstart", f"checkpoint_root_dir={tmp_path}", "seed=x"]
    told = problems([*given, "trainer.checkpoint.storage=bucket"])
    assert len(told) == 2 and not list(tmp_path.iterdir())


def watch(node: Any, seen: set[str], prefix: str = "") -> None:
    """Note in `seen` every key that is asked of this section, or of one inside, from now on."""
    names = {item.name for item in fields(node)}
    for name in names:
        value = getattr(node, name)
        inside = {f"{name}.": value}
        if isinstance(value, list):
            inside = {f"{name}.{number}.": item for number, item in enumerate(value)}
        elif isinstance(value, dict):
            inside = {f"{name}.{word}.": item for word, item in value.items()}
        for part, item in inside.items():
            if is_dataclass(item):
                watch(item, seen, prefix + part)

    def ask(self: Any, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if name in names and not is_dataclass(value):
            seen.add(of_taskset(prefix + name))
        return value

    node.__class__ = type(type(node).__name__, (type(node),), {"__getattribute__": ask})


ROWS = "mode=train {0}.storage_type=file {0}.path=EVAL {0}.format.prompt_type=plaintext".format(
    "buffer.trainer_input.experience_buffer"
)
EXPERT = "{sft_dataset:{storage_type:file,path:EVAL,format:{prompt_type:plaintext}}}"
JUDGED = "{path:EVAL,default_workflow_type:ruler,format:{prompt_type:plaintext}}"


@pytest.mark.parametrize(
    "more",
    [
        "trainer.total_steps=null",
        f"algorithm.algorithm_type=sft buffer.batch_size=2 {ROWS}",
        f"algorithm.algorithm_type=mix +buffer.trainer_input.auxiliary_buffers={EXPERT}",
        "algorithm.algorithm_type=ppo trainer.critic_warmup=1 trainer.stop_at_loss=1",
        "model.tinker.enable=true model.tinker.base_model=a trainer.save_hf_checkpoint=never",
        f"buffer.explorer_input.eval_tasksets=[{JUDGED}] trainer.checkpoint.keep_best=1 "
        "trainer.checkpoint.best_metric=eval/a/b",
        f"{TASKSET}.default_workflow_type=agent device=cuda cluster.gpu_per_node=8 "
        "trainer.num_ranks=null explorer.auxiliary_models=[{name:a,model_path:MODEL}]",
        "synchronizer.sync_method=memory trainer.checkpoint.host_memory_gb=1 "
        "trainer.recompute_granularity=full explorer.over_rollout.ratio=0.5",
    ],
)
def test_a_rule_names_every_key_that_it_reads(
    assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str
) -> None:
    """So none concludes from the default of a key that cannot be read."""
    given = more.replace("EVAL", str(assets / "eval.jsonl")).replace("MODEL", str(assets / "model"))
    (draft,) = configs.stage_drafts(configs.compose(words(assets, tmp_path, *given.split())))
    seen, unnamed, hear = set[str](), set[tuple[str, str]](), Refusals._hear

    def heard(refusals: Refusals, key: str, rule: Rule, config: Config) -> None:
        seen.clear()
        hear(refusals, key, rule, config)
        named = f"{rule.keys} {rule.reads}".split()
        unnamed.update(
            (rule.keys, one)
            for one in seen
            if not any(f"{one}.".startswith(f"{k}.") or k.startswith(f"{one}.") for k in named)
        )

    monkeypatch.setattr(Refusals, "_hear", heard)
    watch(draft.config, seen)
    problems_of(preflight.prepare, [draft])
    assert seen and not unnamed


@pytest.mark.parametrize("every", [15, pytest.param(1, marks=pytest.mark.verify)])
def test_no_rule_says_or_does_anything_over_a_key_that_cannot_be_read(
    assets: Path, tmp_path: Path, every: int
) -> None:
    raw = configs.compose(words(assets, tmp_path, "model.max_prompt_tokens=null"))
    (good,) = configs.stage_drafts(raw)
    wrong = {}
    for key in configs.leaf_keys()[::every]:
        data = OmegaConf.create(asdict(good.config))
        OmegaConf.update(data, key, studio.default_of(key), merge=False)
        draft = Draft(configs.parsed(OmegaConf.to_container(data)), [], [key])
        wrong[key] = problems_of(preflight.prepare, [draft], False)
    assert not any(wrong.values()), {key: said for key, said in wrong.items() if said}


def test_a_checker_tells_all_that_it_sees(assets: Path, tmp_path: Path) -> None:
    """Not the first: of algorithm, schedule, megatron's fields, adapter and tasksets."""
    set_ = "{path:%s,format:{prompt_type:plaintext}," % (assets / "train.jsonl")
    given = [
        "algorithm.kl_loss_fn=k9",
        "algorithm.entropy_loss_fn=no",
        "+algorithm.policy_loss_fn_args={clip_rang:1,clip_range:wide}",
        "algorithm.optimizer.lr_warmup_steps_ratio=2",
        "algorithm.optimizer.lr_decay_style=cosine",
        "trainer.total_steps=5",
        "+trainer.megatron.override_ddp_config={bucket_size:a,overlap:1}",
        "trainer.recompute_method=uniform",
        "model.lora_configs=[{lora_rank:0,target_modules:[nowhere]}]",
        f"{TASKSET}=null",
        f"{TASKSET}s=[{set_}task_selector:{{feature_keys:[a],kwargs:{{b:1,c:2}}}}}},"
        f"{set_}default_workflow_type:agent,workflow_args:{{agnt:1,timeout:0}}}},"
        f"{set_}default_reward_fn_type:none}}]",
    ]
    told = problems([word for word in words(assets, tmp_path) if TASKSET not in word] + given)
    for said in (
        "kl_loss_fn=k9",
        "entropy_loss_fn=no",
        "clip_rang is unknown",
        "clip_range=wide",
        "lr_warmup_steps_ratio=2",
        "lr_decay_style=cosine",
        "bucket_size=a",
        "override_ddp_config=overlap",
        "recompute_method=uniform",
        "lora_rank=0",
        "target_modules",
        "feature_keys",
        "kwargs.b",
        "kwargs.c",
        "agnt",
        "needs one of agent",
        "args.timeout=0",
        "unknown reward 'none'",
    ):
        assert len([one for one in told if said in one]) == 1, (said, told)
    assert len(told) == 18
