"""A policy and engines at a service: the public `tinker` client against the service in miniature of
`tinker_service.py`.
"""

import ast
import asyncio
import copy
import inspect
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rft.algorithm.fields import Fields
from rft.algorithm.losses import token_loss
from rft.checkpoint.records import Committed, Retained
from rft.config import AlgorithmConfig, ConfigError, ModelConfig, OptimizerConfig, TinkerConfig
from rft.data.packing import Row, empty, pack
from rft.extras.tinker.remote_policy import LocalMesh, RemotePolicy, RemoteReference
from rft.extras.tinker.sampler import SamplerEngine
from rft.extras.tinker.saves import METHOD, DamagedRecord, RemoteCheckpoints
from rft.extras.tinker.service import Service, ServiceFailed, end_tokens
from rft.ground.experience import Completion, GenerateRequest, Sampling, decode, encode
from rft.ground.protocols import ActorHandle
from rft.ground.rounds import AtPath, Round, RoundFailed
from rft.rollout.engine import EngineUnavailable
from rft.sync.synchronizer import Synchronizer
from rft.trainer.models import Models
from tests.unit import tinker_service
from tests.unit.test_config import grpo
from tests.unit.tinker_service import BASE, CHUNK, KEY, Trainee

# of the rows of a step: more than a request takes, in several microbatches
LENGTHS = (9, 5, 12, 7, 6)
OPTIMIZER = OptimizerConfig(lr=1e-2, lr_scheduler_type="linear", weight_decay=0.01)
STEPS = 10
GRPO = "buffer.explorer_input.taskset"
REMOTE = [
    "model.tinker.enable=true",
    f"model.tinker.base_model={BASE}",
    "trainer.save_hf_checkpoint=never",
]


@pytest.fixture(scope="module")
def served(assets: Path) -> Iterator[tuple[tinker_service.Service, str]]:
    with tinker_service.serving(str(assets / "model")) as found:
        yield found


@pytest.fixture
def fake(
    served: tuple[tinker_service.Service, str], monkeypatch: pytest.MonkeyPatch
) -> tinker_service.Service:
    """What has been asked of it starts from nothing."""
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    served[0].calls.clear()
    served[0].failing.clear()
    served[0].before_update = lambda trainee: None
    return served[0]


@pytest.fixture
def model(
    fake: tinker_service.Service, served: tuple[tinker_service.Service, str], assets: Path
) -> ModelConfig:
    tinker = TinkerConfig(
        enable=True, base_model=BASE, base_url=served[1], rank=4, seed=3, timeout=30
    )
    return ModelConfig(model_path=str(assets / "model"), tinker=tinker, max_model_len=64)


@pytest.fixture
def service(model: ModelConfig) -> Iterator[Service]:
    found = Service(model.tinker)
    yield found
    found.close()


def policy_of(service: Service, model: ModelConfig, grad_clip: float = 0.5) -> RemotePolicy:
    return RemotePolicy(
        service, model, OPTIMIZER, grad_clip, LocalMesh(), seed=0, total_steps=STEPS
    )


@pytest.fixture
def policy(service: Service, model: ModelConfig) -> RemotePolicy:
    found = policy_of(service, model)
    found.open()
    return found


def a_step(seed: int = 0, temperature: float = 1.0) -> list[Any]:
    """Two prompt tokens each, random ids, advantages of both signs,
    and weights that are no mean of anything.
    """
    random, rows = np.random.default_rng(seed), []
    for length in LENGTHS:
        trained = (np.arange(length) >= 2).astype(np.float32)
        rows.append(
            Row(
                random.integers(5, 40, length),
                trained,
                -trained * random.uniform(3.5, 5, length).astype(np.float32),
                trained * np.float32(random.normal()),
                trained * np.float32(random.uniform(0.01, 0.1)),
                temperature,
            )
        )
    (part,) = pack(rows, 1, 20, 1)
    assert len(part) > 1 and len(rows) > CHUNK
    return part


def independent(
    trainee: Trainee, part: list[Any], loss: Any
) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradient in double precision, straight through the
    model, one microbatch after another.
    """
    model, total = copy.deepcopy(trainee.model).double(), torch.zeros((), dtype=torch.float64)
    model.zero_grad()
    for packed in part:
        scores = torch.zeros(packed.length, dtype=torch.float64)
        for start, stop in zip(packed.cu_seqlens[:-1], packed.cu_seqlens[1:], strict=True):
            ids = torch.from_numpy(packed.tokens[start:stop])
            found = model(ids[None]).logits[0, :-1].log_softmax(-1)
            index = torch.arange(start, stop - 1)
            scores = scores.index_add(0, index, found[torch.arange(len(ids) - 1), ids[1:]])
        fields = Fields.of(
            packed,
            lambda array: (
                torch.from_numpy(array).double()
                if array.dtype.kind == "f"
                else torch.from_numpy(array)
            ),
        )
        losses, _ = loss(scores, fields)
        total = total + (losses * fields.weight).sum()
    total.backward()
    return float(total.detach()), {
        n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo", "sft"])
def test_the_gradient_is_that_of_our_own_loss(
    fake: tinker_service.Service, policy: RemotePolicy, name: str
) -> None:
    # or half of the adapter has no gradient
    policy.train_step(a_step(1), token_loss("sft", {}), lambda: None)
    (trainee,) = list(fake.trainees.values())[-1:]
    part, loss, seen = a_step(2), token_loss(name, {}), {}
    expected, gradient = independent(trainee, part, loss)
    order: list[str] = []

    def look(found: Trainee) -> None:
        order.append("update")
        seen.update(
            {
                n: p.grad.clone().numpy()
                for n, p in found.model.named_parameters()
                if p.grad is not None
            }
        )

    fake.before_update = look
    metrics = policy.train_step(part, loss, lambda: order.append("released"))
    assert order == ["released", "update"]
    assert seen.keys() == gradient.keys()
    largest = max(np.abs(found).max() for found in gradient.values())
    for path, found in gradient.items():
        np.testing.assert_allclose(seen[path], found, atol=2e-5 * largest)
    norm = math.sqrt(sum(float((found**2).sum()) for found in gradient.values()))
    assert metrics["loss"] == pytest.approx(expected, abs=1e-6) and metrics[
        "grad_norm"
    ] == pytest.approx(norm, rel=1e-5)
    assert metrics["num_tokens"] == sum(LENGTHS) - 2 * len(LENGTHS) and metrics["skipped"] == 0
    assert metrics["lr"] == pytest.approx(1e-2 * (1 - 1 / STEPS)), "the schedule is ours"
    (group,) = trainee.optimizer.param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (
        metrics["lr"],
        (0.9, 0.999),
        0.01,
    )


def test_tokens_are_scored_by_the_adapter_and_by_the_model_that_it_began_as(
    fake: tinker_service.Service, service: Service, policy: RemotePolicy
) -> None:
    part, reference = a_step(), RemoteReference(service)
    before = policy.score(part)
    for ours, theirs in zip(before, reference.score(part), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    policy.train_step(part, token_loss("sft", {}), lambda: None)
    (trainee,) = list(fake.trainees.values())[-1:]
    for packed, ours, old, theirs in zip(
        part, policy.score(part), before, reference.score(part), strict=True
    ):
        for start, stop in zip(packed.cu_seqlens[:-1], packed.cu_seqlens[1:], strict=True):
            ids = torch.from_numpy(packed.tokens[start:stop])
            judged = tinker_service.logprobs_of(trainee.model, ids[:-1], ids[1:]).detach()
            np.testing.assert_allclose(ours[start : stop - 1], judged, atol=1e-5)
            assert ours[stop - 1] == 0, "the last token of a sequence predicts nothing"
        assert np.abs(ours - old).max() > 1e-3
        np.testing.assert_allclose(theirs, old, atol=1e-5)


def test_a_step_that_is_not_finite_sends_nothing(
    fake: tinker_service.Service, policy: RemotePolicy
) -> None:
    part = a_step()
    part[0].advantage[part[0].weight != 0] = np.nan
    metrics = policy.train_step(part, token_loss("ppo", {}), lambda: None)
    assert metrics["skipped"] == 1 and math.isnan(metrics["loss"]) and policy.step == 1
    assert "optim_step" not in fake.calls and "forward_backward" not in fake.calls


def test_a_step_with_nothing_to_learn_sends_nothing(
    fake: tinker_service.Service, service: Service, policy: RemotePolicy
) -> None:
    """Neither one of rows that no token is trained of, nor one without rows."""
    untrained, calls = a_step(), len(fake.calls)
    for packed in untrained:
        packed.weight[:] = 0
    for part in (untrained, [empty(1)]):
        for scored in (policy.score(part), RemoteReference(service).score(part)):
            assert [len(values) for values in scored] == [packed.length for packed in part]
        metrics = policy.train_step(part, token_loss("ppo", {}), lambda: None)
        assert (metrics["num_tokens"], metrics["grad_norm"], metrics["skipped"]) == (0, 0, 0)
    assert policy.step == 2
    assert not {"optim_step", "forward_backward"} & set(fake.calls[calls:])


def test_another_temperature_is_refused_by_name(policy: RemotePolicy) -> None:
    with pytest.raises(ValueError, match="temperature 0.5: .*set rollout_args.temperature=1"):
        policy.score(a_step(temperature=0.5))


# --- saves ----------------------------------------------------------------------------------------


def saves_of(root: Path, policy: RemotePolicy, keep: int = 2, reach: int = 0) -> RemoteCheckpoints:
    return RemoteCheckpoints(root / "remote", policy, keep, reach)


def models_of(policy: RemotePolicy) -> Models:
    """With a KL coefficient that moves from step to step."""
    adaptive = {"kl_coef": 0.001, "adaptive": True, "target_kl": 0.1, "horizon": 10.0}
    return Models(policy, None, None, AlgorithmConfig(kl_loss_fn_args=adaptive))  # type: ignore[arg-type]


def saved(checkpoints: RemoteCheckpoints, step: int) -> list[Any]:
    """Save `step` and hear of it."""
    models = models_of(checkpoints.policy)
    models.kl.loss.value = 0.5 + step
    checkpoints.save(step, models, {"step": step, "journal": 100 + step})
    checkpoints.wait(step)
    return checkpoints.poll()


def train(policy: RemotePolicy, steps: int) -> list[float]:
    return [
        policy.train_step(a_step(policy.step), token_loss("sft", {}), lambda: None)["loss"]
        for _ in range(steps)
    ]


def test_a_run_goes_on_from_its_newest_record_exactly(
    fake: tinker_service.Service,
    service: Service,
    model: ModelConfig,
    policy: RemotePolicy,
    tmp_path: Path,
) -> None:
    new = policy_of(service, model)
    assert saves_of(tmp_path, new).load(models_of(new)) is None, "there never was one"
    checkpoints = saves_of(tmp_path, policy)
    train(policy, 2)
    committed, retained = saved(checkpoints, 2)
    assert isinstance(committed, Committed) and (committed.step, committed.collection) == (2, "")
    assert isinstance(retained, Retained) and retained.oldest == {"step": 2, "journal": 102}
    whole = train(policy, 2)  # what a killed run has trained behind its last save
    again = policy_of(service, model)
    resumed, models = saves_of(tmp_path, again), models_of(again)
    assert (
        resumed.load(models) == {"step": 2, "journal": 102}
        and again.step == 2
        and resumed.requested == 2
    )
    assert models.kl.loss.value == 2.5
    assert train(again, 2) == whole, "weights, moments and learning rate are those of step 2"
    assert fake.saved[again.saved("state", 4).result(30)]["updates"] == 4


def test_weights_of_a_step_are_saved_once(
    fake: tinker_service.Service,
    service: Service,
    model: ModelConfig,
    policy: RemotePolicy,
    tmp_path: Path,
) -> None:
    checkpoints = saves_of(tmp_path, policy)
    train(policy, 1)
    path = policy.saved("sampler", 1).result(30)
    saved(checkpoints, 1)
    assert checkpoints.records.read(1).sampler == path
    again = policy_of(service, model)
    saves_of(tmp_path, again).load(models_of(again))
    assert again.saved("sampler", 1).result(30) == path, "nor again after a resume"
    assert [call for call in fake.calls if call.startswith("save")] == [
        "save_weights_for_sampler",
        "save_weights",
    ]


def test_older_records_go_before_the_weights_that_they_name(
    fake: tinker_service.Service, policy: RemotePolicy, tmp_path: Path
) -> None:
    checkpoints = saves_of(tmp_path, policy, keep=2, reach=1)
    for step in range(1, 6):
        train(policy, 1)
        # every step is published, every second one is saved
        policy.saved("sampler", step).result(30)
        reports = saved(checkpoints, step) if step % 2 else []
        checkpoints.tidy(step)
    assert checkpoints.records.steps() == [3, 5] and reports[-1].oldest["step"] == 3
    assert checkpoints.metrics() == {"checkpoint/committed": 3, "checkpoint/failed": 0} | {
        "checkpoint/commit_s": checkpoints.metrics()["checkpoint/commit_s"]
    }
    run = policy.saved("state", 5).result().split("/")[2]
    fake.await_deletions(3)
    left = {tuple(path.split("/")[3:]) for path in fake.saved if path.split("/")[2] == run}
    states = {("weights", f"step_{step:08d}") for step in (3, 5)}
    assert left == states | {("sampler_weights", f"step_{step:08d}") for step in (3, 4, 5)}


def test_a_save_that_fails_is_counted_and_training_goes_on(
    fake: tinker_service.Service, policy: RemotePolicy, tmp_path: Path
) -> None:
    checkpoints = saves_of(tmp_path, policy)
    fake.failing["save_weights"] = "the store is full"
    train(policy, 1)
    checkpoints.save(1, models_of(policy), {"step": 1})
    with pytest.raises(ServiceFailed, match="checkpoint of step 1: .*the store is full"):
        checkpoints.wait(1)
    policy.saved("sampler", 1).result(30)
    assert checkpoints.poll() == [] and checkpoints.metrics()["checkpoint/failed"] == 1
    with pytest.raises(RuntimeError, match="checkpoint of step 1 failed: .*the store is full"):
        checkpoints.wait(1)
    train(policy, 1)
    assert saved(checkpoints, 2)[0].step == 2 and checkpoints.records.steps() == [2]


@pytest.mark.parametrize("kind", ["save_weights", "save_weights_for_sampler"])
def test_a_save_that_failed_is_made_again_when_it_is_asked_for_again(
    fake: tinker_service.Service, policy: RemotePolicy, tmp_path: Path, kind: str
) -> None:
    checkpoints = saves_of(tmp_path, policy)
    fake.failing[kind] = "the store is full"
    train(policy, 1)
    checkpoints.save(1, models_of(policy), {"step": 1})
    with pytest.raises(ServiceFailed, match="checkpoint of step 1: .*the store is full"):
        checkpoints.wait(1)
    assert saved(checkpoints, 1)[0].step == 1 and checkpoints.metrics()["checkpoint/failed"] == 0
    record = checkpoints.records.read(1)
    assert {fake.saved[path]["updates"] for path in (record.state, record.sampler)} == {1}


def test_a_disk_that_takes_no_record_costs_the_save_and_not_the_run(
    policy: RemotePolicy, tmp_path: Path
) -> None:
    checkpoints = saves_of(tmp_path, policy)
    train(policy, 1)
    (tmp_path / "remote").write_text("no directory")
    checkpoints.save(1, models_of(policy), {"step": 1})
    with pytest.raises(RuntimeError, match="checkpoint of step 1 failed: .*remote"):
        checkpoints.wait(1)
    assert checkpoints.poll() == [] and checkpoints.metrics()["checkpoint/failed"] == 1
    (tmp_path / "remote").unlink()
    assert saved(checkpoints, 1)[0].step == 1


def test_what_else_lies_beside_the_records_is_somebodys_own(
    policy: RemotePolicy, tmp_path: Path
) -> None:
    checkpoints = saves_of(tmp_path, policy)
    train(policy, 1)
    saved(checkpoints, 1)
    for name in ("step_copy", "step_00000001 (1)", "step_7"):
        (tmp_path / "remote" / f"{name}.json").write_text("{}")
    assert checkpoints.records.steps() == [1] and checkpoints.newest == 1


def test_a_service_has_all_that_a_loop_asks_of_saves(tmp_path: Path) -> None:
    saves, asked = RemoteCheckpoints(tmp_path, None, 0, 0), set[str]()  # type: ignore[arg-type]
    root = Path(inspect.getfile(Models)).parents[1]
    for path in [*(root / "trainer").glob("*.py"), root / "run" / "assembly.py"]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = node.func if isinstance(node, ast.Call) else node
            if not (
                isinstance(called, ast.Attribute)
                and ast.unparse(called.value).split(".")[-1] == "checkpoints"
                and called.attr != "export"  # refused by the config
            ):
                continue
            asked.add(called.attr)
            assert hasattr(saves, called.attr), f"{path}: {called.attr}"
            if isinstance(node, ast.Call):
                keywords = {str(keyword.arg): None for keyword in node.keywords}
                inspect.signature(getattr(saves, called.attr)).bind(*node.args, **keywords)
    assert {"save", "copy_now", "wait", "remembered"} <= asked


@pytest.mark.parametrize("damage", ["", "half", "more", "edited", "moved"])
def test_a_record_that_is_not_as_it_was_written_stops_the_run_by_name(
    policy: RemotePolicy, tmp_path: Path, damage: str
) -> None:
    checkpoints = saves_of(tmp_path, policy)
    saved(checkpoints, 0)
    train(policy, 1)
    saved(checkpoints, 1)
    path = tmp_path / "remote" / "step_00000001.json"
    data = path.read_bytes()
    damaged = {
        "": b"",
        "half": data[: len(data) // 2],
        "more": data + b"{}",
        "edited": data.replace(b'"journal":101', b'"journal":901'),
        "moved": (tmp_path / "remote" / "step_00000000.json").read_bytes(),
    }[damage]
    assert damaged != data
    path.write_bytes(damaged)
    with pytest.raises(DamagedRecord) as refused:
        saves_of(tmp_path, policy).load(models_of(policy))
    assert str(path) in str(refused.value) and "delete it to go on of step 0" in str(refused.value)


def test_a_record_of_another_adapter_is_refused(
    service: Service, policy: RemotePolicy, tmp_path: Path
) -> None:
    saved(saves_of(tmp_path, policy), 0)
    policy.config = TinkerConfig(base_model=BASE, rank=8)
    with pytest.raises(ValueError, match="toy with rank 4, model.tinker says toy with rank 8"):
        saves_of(tmp_path, policy).load(models_of(policy))


# --- engines --------------------------------------------------------------------------------------


def asked(n: int = 1, tokens: int = 6, **more: Any) -> bytes:
    prompt = more.pop("prompt", [10, 11, 12])
    return encode(
        GenerateRequest(
            request_id="one",
            prompt=prompt,
            n=n,
            sampling=Sampling(max_tokens=tokens, seed=7),
            **more,
        )
    )


def round_of(version: int, path: str) -> Round:
    return Round(version=version, digest=path, timeout=30.0, location=AtPath(path=path))


def test_every_token_has_the_version_that_sampled_it(
    fake: tinker_service.Service, model: ModelConfig, policy: RemotePolicy
) -> None:
    paths = [policy.saved("sampler", 0).result(30)]
    train(policy, 3)
    paths.append(policy.saved("sampler", 3).result(30))
    engine = SamplerEngine("engine_0", model, 64)

    async def run() -> list[list[Completion]]:
        await engine.start()
        with pytest.raises(EngineUnavailable, match="no weights yet"):
            await engine.generate(asked())
        found = []
        for version, path in zip((0, 3), paths, strict=True):
            await engine.stage(round_of(version, path))
            assert await engine.weight_version() == 0, "until the commit the older one serves"
            report = await engine.commit(round_of(version, path))
            assert (report.version, report.digest) == (version, path)
            found.append(decode(await engine.generate(asked(n=2)), list[Completion]))
        with pytest.raises(RoundFailed) as failed:
            await engine.stage(round_of(4, "tinker://nobody:train:0/sampler_weights/step_00000004"))
        assert (
            failed.value.kind == "broken"
            and "engine_0: version 4 is not at tinker://nobody" in str(failed.value)
        )
        assert (await engine.stats())["tokens"] == sum(
            len(one.tokens) for made in found for one in made
        )
        await engine.shutdown()
        return found

    for (version, path), made in zip(
        zip((0, 3), paths, strict=True), asyncio.run(run()), strict=True
    ):
        judge = tinker_service.adapted(fake.base, fake.saved[path]["lora"])
        judge.load_state_dict(fake.saved[path]["adapter"], strict=False)
        assert len(made) == 2
        for one in made:
            assert [(s.version, s.start, s.end) for s in one.versions] == [
                (version, 0, len(one.tokens))
            ]
            ids = torch.tensor([10, 11, 12, *one.tokens])
            expected = tinker_service.logprobs_of(judge, ids[:-1], ids[1:])[2:].detach()
            np.testing.assert_allclose(one.logprobs, expected, atol=1e-5)
            assert one.stop == (
                "stop" if one.tokens[-1] in end_tokens(model.model_path) else "length"
            )


class Remote:
    """An engine as Ray's actor handle shows it."""

    def __init__(self, engine: SamplerEngine):
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.engine, name)
        return SimpleNamespace(remote=lambda *given: asyncio.ensure_future(method(*given)))


def test_the_synchronizer_leads_a_service(model: ModelConfig, policy: RemotePolicy) -> None:
    path, engine = policy.saved("sampler", 0).result(30), SamplerEngine("engine_0", model, 64)

    async def run() -> None:
        await engine.start()
        synchronizer = Synchronizer(None, timeout=30.0)
        await synchronizer.join("engine_0", ActorHandle(Remote(engine)))
        await synchronizer.attach(1, METHOD)
        numbers = await synchronizer.publish(0, 1, path, AtPath(path=path))
        assert numbers["engines"] == 1 and await engine.weight_version() == 0
        await synchronizer.shutdown()
        await engine.shutdown()

    asyncio.run(run())


def test_requests_end_where_they_must(
    model: ModelConfig, policy: RemotePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, engine = policy.saved("sampler", 0).result(30), SamplerEngine("engine_0", model, 16)

    async def run() -> None:
        await engine.start()
        await engine.stage(round_of(0, path))
        await engine.commit(round_of(0, path))
        (made,) = decode(
            await engine.generate(asked(prompt=[10] * 12, tokens=50)), list[Completion]
        )
        assert len(made.tokens) <= 4, "the context is full"
        (none,) = decode(await engine.generate(asked(prompt=[10] * 16)), list[Completion])
        assert (none.stop, none.ids) == ("prompt_too_long", [])
        (first,) = decode(
            await engine.generate(asked(stop_token_ids=list(range(100)))), list[Completion]
        )
        assert first.stop == "stop" and len(first.tokens) == 1, (
            "the token that ends a response is in it"
        )
        with pytest.raises(ValueError, match="give stop_token_ids instead of stop"):
            await engine.generate(asked(stop=["\n"]))
        held = asyncio.create_task(engine.generate(asked(prompt=[10, 11])))
        await asyncio.sleep(0)  # it begins
        await engine.abort("one")
        (aborted,) = decode(await held, list[Completion])
        assert aborted.stop == "abort" and engine._running == {}
        await engine.shutdown()

    asyncio.run(run())


# --- what cannot work -----------------------------------------------------------------------------


def test_the_service_is_asked_at_the_start(
    model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.tinker.base_model = "another"
    with pytest.raises(ConfigError, match="model.tinker.base_model=another: the service has toy"):
        Service(model.tinker)
    monkeypatch.setenv("TINKER_API_KEY", "tml-another-key")
    model.tinker.base_url = str(model.tinker.base_url).replace(
        "127.0.0.1", "localhost"
    )  # the client keeps what it is connected to
    with pytest.raises(ServiceFailed, match="no such key"):
        Service(model.tinker)


def test_an_answer_that_does_not_come_is_an_error(service: Service) -> None:
    from concurrent.futures import Future

    service.config.timeout = 0.01
    with pytest.raises(
        ServiceFailed, match="saving: no answer in 0.01 s, which model.tinker.timeout allows"
    ):
        service.answer(Future(), "saving")


def test_one_switch_turns_everything(
    assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    (config,) = grpo(assets, tmp_path, *REMOTE)
    assert (config.trainer.trainer_type, config.explorer.rollout_model.engine_type) == (
        "tinker",
        "tinker",
    )
    assert (config.synchronizer.sync_method, config.device, config.trainer.num_ranks) == (
        "checkpoint",
        "cpu",
        1,
    )
    (other,) = grpo(assets, tmp_path, "trainer.trainer_type=tinker", *REMOTE[1:])
    assert other == config
    (config,) = grpo(assets, tmp_path)
    assert (config.trainer.trainer_type, config.explorer.rollout_model.engine_type) == (
        "megatron",
        "vllm",
    )


def test_a_key_is_needed_and_weights_are_not(
    assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="set the variable TINKER_API_KEY"):
        grpo(assets, tmp_path, *REMOTE)
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    bare = tmp_path / "model"
    bare.mkdir()
    for file in (assets / "model").glob("*.json"):
        (bare / file.name).write_bytes(file.read_bytes())
    (config,) = grpo(assets, tmp_path, *REMOTE, f"model.model_path={bare}")
    assert config.model.model_path == str(bare)
