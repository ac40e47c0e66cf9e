"""The experts that an engine routed each token through: from its completion, through the journal,
into the step's batch.
"""

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from rft.algorithm import credit
from rft.buffer.delivery import opened
from rft.buffer.experience_buffer import ExperienceBuffer
from rft.config import AlgorithmConfig, ExperienceBufferConfig
from rft.data.packing import Cost, pack, stack
from rft.data.wire import Microbatches, encode_part
from rft.ground.experience import (
    NO_EXPERT,
    Batch,
    Completion,
    Experience,
    RoutedExperts,
    Sampling,
    Task,
    decode,
    encode,
    route_dtype,
)
from rft.ground.families import route_bytes, routing_of
from rft.rollout.workflows import check, experience
from rft.rollout.workflows.dialogue import Dialogue
from rft.trainer.feed import Feed
from tests.unit.test_feed import Alone, Rows

LAYERS, TOP_K, PROMPT, RESPONSE = 3, 2, 4, 5


def routed(dtype: str = "uint8") -> RoutedExperts:
    """Of every token that went through the model: all but the last."""
    numbers = np.arange((PROMPT + RESPONSE - 1) * LAYERS * TOP_K).astype(dtype)
    return RoutedExperts(layers=LAYERS, top_k=TOP_K, dtype=dtype, data=numbers.tobytes())


def made(routes: RoutedExperts | None) -> Experience:
    completion = Completion(
        tokens=[7] * RESPONSE,
        logprobs=[-0.5] * RESPONSE,
        versions=[],
        stop="stop",
        routed_experts=routes,
    )
    task = Task(id="t/0/0", taskset="t", row=0, prompt="?", sampling=Sampling())
    return experience(task, [5] * PROMPT, completion, None)


def test_they_are_counted_by_position() -> None:
    assert routed().positions == routed("uint16").positions == PROMPT + RESPONSE - 1


def test_they_come_out_of_the_journal_as_they_went_in(tmp_path: Path) -> None:
    rows = [made(routed()), made(None), made(routed("uint16"))]

    async def through() -> list[Experience]:
        for attempt in range(2):  # the second reads what the first has written
            buffer = ExperienceBuffer(ExperienceBufferConfig(), str(tmp_path), 1, 1, 1, None, 2**20)
            await buffer.attach_trainer(0, attempt + 1)
            if not attempt:
                await buffer.admit("e", b"task", {})
                await buffer.put(0, encode(rows))
            batch = opened(await buffer.take(0))
            await buffer.shutdown()
        return batch.experiences

    found = asyncio.run(asyncio.wait_for(through(), 30))
    assert [e.routed_experts for e in found] == [routed(), None, routed("uint16")]


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_they_are_packed_beside_their_tokens_and_travel_to_the_ranks(dtype: str) -> None:
    """Of two rows, one without: its tokens have none, nor has the last token, nor padding."""
    given = [made(routed(dtype)), made(None)]
    part = stack(credit.rows(credit.judge(given, None, {}), "token-mean"), 1, 100, 4)[0]
    (found,) = Microbatches(encode_part(part))
    assert found.length == 20 and found.routes is not None and found.routes.dtype == dtype
    start = found.cu_seqlens[found.rows.tolist().index(0)]
    own = found.routes[start : start + PROMPT + RESPONSE - 1]
    assert own.tobytes() == routed(dtype).data
    others = np.delete(found.routes, np.arange(start, start + len(own)), axis=0)
    assert len(others) == 12 and (others == NO_EXPERT[dtype]).all()


def test_a_batch_without_any_is_packed_as_ever() -> None:
    rows = credit.rows(credit.judge([made(None)], None, {}), "token-mean")
    assert pack(rows, 1, 100, 1)[0][0].routes is None


@pytest.mark.parametrize("replays", [True, False])
def test_tokens_without_a_route_are_counted_and_all_are_where_none_is_replayed(
    replays: bool,
) -> None:
    class Two(Rows):
        def take(self, step: int) -> Batch:
            return Batch(step=step, experiences=[made(routed()), made(None)])

    recipe = AlgorithmConfig(algorithm_type="sft", loss_agg_mode="token-mean")
    feed = Feed(Two(), Alone(), recipe, 100, 1, Cost(), replays=replays)
    step = feed.next(0, stopping=False)
    assert step is not None and (step.part[0].routes is not None) is replays
    free = 1 + PROMPT + RESPONSE
    assert step.metrics.get("routing/free_tokens") == (free if replays else None)


def test_a_conversation_keeps_the_routes_that_its_tokens_were_sampled_behind() -> None:
    """Each call's prompt begins with all tokens before it; a call without any leaves a hole that
    the next one fills.
    """
    task = Task(id="t/0/0", taskset="t", row=0, prompt="?", sampling=Sampling())

    def said(prompt: int, number: int) -> Completion:
        routes = np.full((prompt + RESPONSE - 1, LAYERS, TOP_K), number, np.uint8)
        return Completion(
            tokens=[7] * RESPONSE,
            logprobs=[-0.5] * RESPONSE,
            versions=[],
            stop="stop",
            routed_experts=RoutedExperts.of(routes) if number else None,
        )

    talk = Dialogue(task, [5] * PROMPT, 0)
    for number in (1, 0, 3):
        talk.say(said(len(talk.ids), number))
        talk.add([9, 9])
    whole = talk.whole()
    assert whole.routed_experts is not None
    found = whole.routed_experts.array(len(whole.tokens))[:, 0, 0].tolist()
    first, last = PROMPT + RESPONSE - 1, 3 * RESPONSE + PROMPT + 2 * 2 - 1
    assert found == [1] * first + [3] * (last - first) + [NO_EXPERT["uint8"]] * 3
    assert whole.routed_experts.first(first) == talk.turns[0].routed_experts


def test_a_reference_is_routed_as_the_policy_where_it_is_of_its_shape() -> None:
    mixture = {"architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 4, "num_experts": 8}
    mixture |= {"num_experts_per_tok": 2, "mlp_only_layers": [0]}
    assert routing_of(mixture) == (3, 2, 8)
    assert routing_of({"num_hidden_layers": 4}) == (0, 0, 0)


@pytest.mark.parametrize("experts", [8, 255, 256])
def test_a_token_takes_the_room_that_is_planned_for_it(experts: int) -> None:
    mixture = {"architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 3}
    mixture |= {"num_experts": experts, "num_experts_per_tok": 2}
    routes = np.zeros((1, LAYERS, TOP_K), route_dtype(experts))
    assert len(RoutedExperts.of(routes).data) == route_bytes(mixture)


def test_more_than_there_are_tokens_of_are_refused() -> None:
    with pytest.raises(ValueError, match="routes of 8 tokens, where there are 7"):
        routed().array(PROMPT + RESPONSE - 2)


def test_a_workflow_that_cuts_a_response_cuts_its_routes_too() -> None:
    task = Task(id="t/0/0", taskset="t", row=0, prompt="?", sampling=Sampling())
    whole = made(routed())
    assert check(task, [whole]) == []
    cut = replace(
        whole,
        tokens=whole.tokens[:-2],
        action_mask=whole.action_mask[:-2],
        logprobs=whole.logprobs[:-2],
    )
    with pytest.raises(ValueError, match="routed_experts of 8 tokens, where there are 7"):
        check(task, [cut])
    cut.routed_experts = routed().first(6)
    assert check(task, [cut]) == []


def test_none_is_never_the_number_of_an_expert() -> None:
    assert [route_dtype(experts) for experts in (8, 255, 256, 384)] == [
        *("uint8", "uint8", "uint16", "uint16")
    ]


def test_records_written_before_there_was_such_a_field_still_decode() -> None:
    fields = msgspec.msgpack.decode(encode(made(None)))
    assert "routed_experts" not in fields, "a dense model's records are as small as ever"
    old = {"tokens": [1, 2], "prompt_length": 1, "action_mask": [1], "reward": 1.5}
    assert decode(msgspec.msgpack.encode(old), Experience).routed_experts is None
    reply = {"tokens": [2], "logprobs": [-1.0], "versions": [], "stop": "stop"}
    assert decode(msgspec.msgpack.encode(reply), Completion).routed_experts is None
