"""The keys that cut a step into microbatches reach the packing."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from rft.algorithm import credit
from rft.buffer.calls import AGAIN_S, BufferBroken
from rft.buffer.delivery import Delivery, StoredGroup
from rft.config import (
    AlgorithmConfig,
    Config,
    ConfigError,
    ExperienceBufferConfig,
    MegatronConfig,
    ModelConfig,
    RowFormatConfig,
    TrainerConfig,
)
from rft.data.chat import load_tokenizer
from rft.data.packing import Cost, Packed, PackingPolicy, Stacked, cut_of
from rft.data.updates import ONE_UPDATE, UpdateRule
from rft.ground.experience import Batch, Experience, encode
from rft.ground.names import read_hf_config
from rft.ground.protocols import ActorHandle
from rft.run.assembly import build_feed, rule_of
from rft.tools.toy import write_model
from rft.trainer import control
from rft.trainer.control import QueueSource
from rft.trainer.feed import WAITS, Feed

LENGTHS = [9, 3, 7, 5]


class Alone:
    """One rank that is all of them."""

    rank, dp, cp = 0, 1, 1

    def broadcast(self, item: Any) -> Any:
        return item

    def scatter_parts(self, parts: list[list[Stacked]] | None) -> list[Packed]:
        assert parts is not None
        return [stacked.packed() for stacked in parts[0]]


class Rows:
    def take(self, step: int) -> Batch:
        rows = [
            Experience(tokens=[1] * n, prompt_length=1, action_mask=[1] * (n - 1)) for n in LENGTHS
        ]
        return Batch(step=step, experiences=rows)

    def consumed(self, step: int) -> None: ...

    def mark(self) -> int:
        return 0

    def saved(self, step: int) -> None: ...
    def retain(self, loop: dict[str, Any]) -> None: ...


@pytest.mark.parametrize(
    ("keys", "cut", "bounds"),
    [
        ({}, PackingPolicy(share=True), [[0, 9, 12, 19, 24]]),
        ({"share_prefixes": False}, PackingPolicy(), [[0, 9, 12, 19, 24]]),
        (
            {"megatron": MegatronConfig(context_parallel_size=2)},
            PackingPolicy(),
            [[0, 9, 12, 19, 24]],
        ),
        (
            {"use_dynamic_bsz": False, "ppo_micro_batch_size_per_gpu": 3},
            PackingPolicy(rows=3),
            [[0, 9, 16, 21], [0, 3]],
        ),
        (
            {"balance_batch": False, "use_remove_padding": False},
            PackingPolicy(balance=False, pad=True),
            [[0, 9, 18, 27], [0, 5]],
        ),
    ],
)
def test_microbatches_are_what_the_config_asks_for(
    keys: dict[str, Any], cut: PackingPolicy, bounds: list[list[int]]
) -> None:
    assert cut_of(TrainerConfig(**keys)) == cut
    recipe = AlgorithmConfig(algorithm_type="sft", loss_agg_mode="token-mean")
    feed = Feed(Rows(), Alone(), recipe, 30, 1, Cost(), cut_of(TrainerConfig(**keys)))
    step = feed.next(0, stopping=False)
    assert step is not None and [packed.cu_seqlens.tolist() for packed in step.part] == bounds


def test_a_batch_is_cut_into_the_updates_that_the_config_asks_for() -> None:
    config = Config(name="a", seed=3)
    assert rule_of(config) == replace(ONE_UPDATE, seed=3)
    config.trainer = TrainerConfig(ppo_epochs=4, ppo_mini_batch_size=2, ppo_shuffle=True)
    assert rule_of(config) == UpdateRule(4, 2, True, 3)


class Method:
    def __init__(self, buffer: "Buffer", name: str):
        self.buffer, self.name = buffer, name

    def remote(self, *arguments: Any) -> Any:
        self.buffer.asked.append((self.name, *arguments))
        return self.buffer.answers[self.name]


class Buffer:
    """An actor whose answers are what `ray.get` is given back, or raises."""

    def __init__(self, answers: dict[str, Any]):
        self.answers, self.asked = answers, list[Any]()

    def __getattr__(self, name: str) -> Method:
        return Method(self, name)


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was waited for."""
    found = list[Any]()

    def get(answer: Any, timeout: float) -> Any:
        found.append(answer)
        if isinstance(answer, list):
            answer = answer.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr("ray.get", get)
    monkeypatch.setattr(control.time, "sleep", lambda seconds: None)
    return found


LOOP = {"journal": 7, "step": 3}


def test_a_save_waits_for_nothing_of_the_buffer(heard: list[Any]) -> None:
    """What it is told then was done, at the latest, when it is asked the next time."""
    buffer = Buffer({"consumed": 90, "saved": None, "retain": 2, "wants_weights": False})
    source = QueueSource(ActorHandle(buffer), 1.0)
    source.consumed(4)
    assert heard == [90] and source.mark() == 90
    source.saved(5)
    assert source.retain(LOOP) is None, "of the checkpoint before, and there was none"
    assert heard == [90] and buffer.asked[1:] == [("saved", 5), ("retain", 7, 3)]
    assert source.wants_weights(1) is False and heard == [90, None, 2, False]
    assert source.retain(LOOP) == 2
    source.close()
    assert heard[4:] == [2]


def test_before_the_first_step_the_buffer_is_asked_where_it_stands(heard: list[Any]) -> None:
    buffer = Buffer({"position": 40})
    source = QueueSource(ActorHandle(buffer), 1.0)
    assert (source.mark(), source.mark()) == (40, 40) and buffer.asked == [("position",)]


def test_what_the_buffer_could_not_do_is_asked_again_and_raised(
    heard: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = Buffer({"saved": [BufferBroken("full"), None], "consumed": 8})
    source = QueueSource(ActorHandle(buffer), 1.0)
    source.saved(5)
    source.consumed(5)
    assert [name for name, *_ in buffer.asked] == ["saved", "saved", "consumed"]
    buffer.answers["saved"] = BufferBroken("full")
    source.saved(6)
    monkeypatch.setattr(control, "RETURN_S", AGAIN_S / 2)
    with pytest.raises(BufferBroken):
        source.consumed(6)
    source.consumed(6)


@pytest.mark.parametrize(("age", "step", "oldest"), [(None, 5, None), (2, 5, 3), (2, 1, 0)])
def test_the_buffer_is_told_from_which_version_on_groups_are_taken(
    heard: list[Any], age: int | None, step: int, oldest: int | None
) -> None:
    buffer = Buffer({"take": encode(Delivery(step=step))})
    assert QueueSource(ActorHandle(buffer), 1.0, age).take(step).experiences == []
    assert buffer.asked == [("take", step, "trainer", oldest)]


def test_every_rank_hears_that_a_batch_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One may take longer than ranks wait for rank 0 without a word of it; what never comes ends
    rank 0 with the buffer's own limit.
    """
    now, said = [0.0], list[Any]()
    monkeypatch.setattr(control.time, "monotonic", lambda: now[0])
    rows = memoryview(encode(Rows().take(3).experiences))
    batch = encode(Delivery(step=3, parts=[StoredGroup(group=0, timeline=0, experiences=rows)]))

    def get(come_s: float, timeout: float) -> bytes:
        now[0] = min(come_s, now[0] + timeout)
        if now[0] < come_s:
            raise ray.exceptions.GetTimeoutError("not yet")
        return batch

    class Lead(Alone):
        def broadcast(self, item: Any) -> Any:
            said.append(item)
            return item

    class Other(Alone):
        rank = 1

        def broadcast(self, item: Any) -> Any:
            return said.pop(0)

        def scatter_parts(self, parts: list[list[Stacked]] | None) -> list[Packed]:
            return []

    monkeypatch.setattr("ray.get", get)
    recipe = AlgorithmConfig(algorithm_type="sft", loss_agg_mode="token-mean")
    source = QueueSource(
        ActorHandle(Buffer({"take": 1000.0})), 1800.0, None, partial(said.append, WAITS), 450.0
    )
    lead, other = (
        Feed(one, ranks, recipe, 100, 1, Cost())  # type: ignore[arg-type]
        for one, ranks in ((source, Lead()), (None, Other()))
    )
    lead.ahead = None  # it would look for the next one in a thread
    found = lead.next(3, stopping=False)
    assert said[:-1] == [WAITS, WAITS] and now == [1000.0]
    heard = other.next(3, stopping=False)
    assert found and heard and heard.metrics == found.metrics and said == []
    source.buffer.actor.answers["take"] = 1e9
    with pytest.raises(ray.exceptions.GetTimeoutError):
        lead.next(4, stopping=False)
    assert now == [1000.0 + 1800.0 + control.READ_MARGIN_S]


@pytest.mark.parametrize("outcome", ["timeout", "error"])
def test_a_reward_that_failed_trains_nothing_and_moves_no_baseline(outcome: Any) -> None:
    def step(*judged: tuple[float, Any]) -> Packed:
        class Group(Rows):
            def take(self, step: int) -> Batch:
                made = [
                    Experience(
                        tokens=[1, n],
                        prompt_length=1,
                        action_mask=[1],
                        group=0,
                        reward=r,
                        reward_outcome=o,
                        logprobs=[-1.0],
                    )
                    for n, (r, o) in enumerate(judged)
                ]
                return Batch(step=step, experiences=made)

        recipe = AlgorithmConfig(
            algorithm_type="grpo", advantage_fn="grpo", loss_agg_mode="token-mean"
        )
        found = Feed(Group(), Alone(), recipe, 30, 1, Cost()).next(0, stopping=False)
        assert found is not None
        (part,) = found.part
        failed[len(judged)] = found.metrics["reward/failed_frac"]
        return part

    failed: dict[int, float] = {}
    with_it, without = (
        step((1.0, "ok"), (0.5, "ok"), (0.0, outcome)),
        step((1.0, "ok"), (0.5, "ok")),
    )
    assert with_it.tokens.tolist() == without.tokens.tolist() == [1, 0, 1, 1]
    assert (
        with_it.advantage.tolist() == without.advantage.tolist()
        and with_it.weight.tolist() == without.weight.tolist()
    )
    assert failed == {3: pytest.approx(1 / 3), 2: 0.0}


def test_a_group_whose_greedy_response_has_no_reward_is_left_out() -> None:
    def one(group: int, outcome: Any, **info: Any) -> Experience:
        return Experience(
            tokens=[1, 2],
            prompt_length=1,
            action_mask=[1],
            group=group,
            reward_outcome=outcome,
            info=info,
        )

    kept, lost = (
        [one(0, "ok"), one(0, "ok", baseline=True)],
        [one(1, "ok"), one(1, "timeout", baseline=True)],
    )
    assert credit.scored([*kept, *lost, one(0, "error")]) == kept


class Odd(Rows):
    def take(self, step: int) -> Batch:
        batch = super().take(step)
        for at, token in ((1, 90), (3, -1)):
            batch.experiences[at].tokens[1], batch.experiences[at].task = token, f"a/0/{at}"
        batch.experiences[2].temperature = 0.0
        return batch


def test_tokens_of_another_model_and_no_temperature_are_refused() -> None:
    """An embedding would take rows of its padding, or of nobody's memory."""
    recipe = AlgorithmConfig(algorithm_type="sft", loss_agg_mode="token-mean")
    feed = Feed(Odd(), Alone(), recipe, 100, 1, Cost(), vocab=90)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as error:
        feed.next(0, stopping=False)
    ids, temperature = error.value.problems
    assert (
        "2 of the step's 4" in ids and "vocab_size=90" in ids and "like 90 of task 'a/0/1'" in ids
    )
    assert "1 of the step's 4" in temperature and "like 0 of" in temperature
    larger = Feed(Rows(), Alone(), recipe, 100, 1, Cost(), vocab=2)  # type: ignore[arg-type]
    assert larger.next(0, stopping=False) is not None, "1 is the last of two"


def test_a_run_knows_which_tokens_its_model_has(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    tokenizer = load_tokenizer(ModelConfig(model_path=str(tmp_path / "model")))
    hf = read_hf_config(tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "response": "2"}\n')
    config = Config(name="x")
    config.algorithm = AlgorithmConfig(algorithm_type="sft", loss_agg_mode="token-mean")
    config.buffer.trainer_input.experience_buffer = ExperienceBufferConfig(
        "rows", "file", str(rows), format=RowFormatConfig("plaintext")
    )
    config.model.max_model_len, ranks = 64, Alone()

    def built(vocab: int) -> Feed:
        policy = SimpleNamespace(hf_config=hf | {"vocab_size": vocab}, multiple=1)
        return build_feed(config, ranks, SimpleNamespace(policy=policy), tokenizer)  # type: ignore[arg-type]

    assert built(hf["vocab_size"]).vocab == hf["vocab_size"]
    with pytest.raises(ConfigError, match=r"row 1 of .* has vocab_size=3"):
        built(3)


def test_what_is_left_out_of_a_step_is_no_work_of_it() -> None:
    """Of each group of `raft` one response is trained on; the others cost nothing."""
    recipe = AlgorithmConfig(algorithm_type="raft", advantage_fn="raft", loss_agg_mode="token-mean")

    class Groups(Rows):
        def take(self, step: int) -> Batch:
            batch = super().take(step)
            for at, one in enumerate(batch.experiences):
                one.group, one.sample, one.reward = 0, at, float(at == 2)
            return batch

    feed = Feed(Groups(), Alone(), recipe, 100, 1, Cost(0.0, 1.0))  # type: ignore[arg-type]
    step = feed.next(0, stopping=False)
    assert step is not None
    work = [step.metrics[f"packing/{name}"] for name in ("tokens", "forward_flops")]
    assert work == [LENGTHS[2], LENGTHS[2] ** 2]
