"""The experts that an engine routed each token through: from its completion, through the journal,
into the step's batch.
"""

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest

from rft.algorithm import credit
from rft.buffer.delivery import opened
from rft.buffer.experience_buffer import ExperienceBuffer
from rft.config import ExperienceBufferConfig
from rft.data.packing import pack, stack
from rft.data.wire import decode_part, encode_part
from rft.ground.experience import (
    NO_EXPERT,
    Completion,
    Experience,
    RoutedExperts,
    Sampling,
    Task,
    decode,
    encode,
    route_dtype,
)
from rft.rollout.workflows import experience

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
    (found,) = [stacked.packed() for stacked in decode_part(encode_part(part))]
    assert found.length == 20 and found.routes is not None and found.routes.dtype == dtype
    start = found.cu_seqlens[found.rows.tolist().index(0)]
    own = found.routes[start : start + PROMPT + RESPONSE - 1]
    assert own.tobytes() == routed(dtype).data
    others = np.delete(found.routes, np.arange(start, start + len(own)), axis=0)
    assert len(others) == 12 and (others == NO_EXPERT[dtype]).all()


def test_a_batch_without_any_is_packed_as_ever() -> None:
    rows = credit.rows(credit.judge([made(None)], None, {}), "token-mean")
    assert pack(rows, 1, 100, 1)[0][0].routes is None


def test_more_than_there_are_tokens_of_are_refused() -> None:
    with pytest.raises(ValueError, match="routes of 8 tokens, where there are 7"):
        routed().array(PROMPT + RESPONSE - 2)


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
