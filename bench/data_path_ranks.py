"""One rank of `bench.data_path`, of whatever rft is on the path; rank 0 also starts the buffer, in
a process of its own, as it has one in a run.

    RANK=0 WORLD_SIZE=8 PYTHONPATH=CHECKOUT python bench/data_path_ranks.py WHERE TOKENS STEPS

In: a directory, the tokens of an experience, a number of steps, and the variables of
torch.distributed. Out, of rank 0: a line of JSON with the seconds of every step from the call to
the durable journal until all ranks have their tensors, and memory. Only the standard library,
numpy, torch and rft are imported, and of rft what both it and commit 8c2d7f2 have.
"""

import asyncio
import importlib
import importlib.util
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROWS, REPEATS, PROMPT_SHARE, VOCABULARY = 1024, 8, 4, 151_936
TP, TIMEOUT_S = 2, 600.0
AHEAD, TRAIN_S = 4, 3.0  # steps with the next one read ahead, the first of them without
AT_ONCE = 16  # groups that are stored by one write to the disk
IS_NEW = importlib.util.find_spec("rft.feed") is None


def part(new: str, old: str) -> Any:
    """A module by its name here, or by the one that it had."""
    return importlib.import_module(new if IS_NEW else old)


def held(values: Any) -> Any:
    """As an experience holds them."""
    return values if IS_NEW else values.tolist()


def group(seed: int, tokens: int) -> bytes:
    """As an explorer sends it: responses of one prompt."""
    experience = part("rft.ground.experience", "rft.experience")
    draw, prompt = np.random.default_rng(seed), tokens // PROMPT_SHARE
    response, asked = tokens - prompt, draw.integers(VOCABULARY, size=prompt)
    made = []
    for sample in range(REPEATS):
        columns = {
            "tokens": np.concatenate([asked, draw.integers(VOCABULARY, size=response)]),
            "action_mask": np.ones(response, dtype=np.int64),
            "logprobs": -draw.random(response, dtype=np.float32),
        }
        one = experience.Experience(
            **{name: held(values) for name, values in columns.items()},
            prompt_length=prompt,
            reward=float(sample % 2),
            sample=sample,
            task="task",
            versions=[experience.VersionSpan(version=0, start=0, end=response)],
            reward_outcome="ok",
        )
        if IS_NEW:
            one.as_columns()
        made.append(one)
    return bytes(experience.encode(made))


def buffer(where: str) -> Any:
    from rft.buffer.experience_buffer import ExperienceBuffer

    config = part("rft.config", "rft.config").ExperienceBufferConfig()
    return ExperienceBuffer(config, where, ROWS // REPEATS, REPEATS, None, None)


async def fill(where: str, tokens: int, steps: int) -> None:
    made, groups = buffer(where), steps * ROWS // REPEATS
    await made.attach_trainer(0, 1)
    await made.attach_explorer("explorer")
    for first in range(0, groups, AT_ONCE):
        asked = [(b"task", {"next": first + number}) for number in range(AT_ONCE)]
        admitted = await made.admit_some("explorer", asked)
        await asyncio.gather(*(made.put(number, group(number, tokens)) for number in admitted))
    await made.shutdown()


def forget_pages(where: str) -> None:
    """The journal's, so that they are read from the disk."""
    for path in Path(where).glob("*.log"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def serve(where: str, pipe: Any) -> None:
    """Answer with the batch of a step."""

    async def answers() -> None:
        if IS_NEW:
            part("rft.ground.host_memory", "").keep_no_blocks()
        made = buffer(where)
        await made.attach_trainer(0, 2)
        if IS_NEW:  # behind the last step is nothing to wait for
            await made.input_done()
        pipe.send(resident())
        while (asked := await asyncio.to_thread(pipe.recv)) is not None:
            method, step, *more = asked
            pipe.send_bytes(await getattr(made, method)(step, *more))
            if method == "take":
                await made.consumed(step)
        pipe.send(resident())
        await made.shutdown()

    asyncio.run(answers())


def filled(where: str, tokens: int, steps: int) -> None:
    asyncio.run(fill(where, tokens, steps))


def resident() -> int:
    """Bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Source:
    """The `BatchSource` of rank 0."""

    def __init__(self, where: str, tokens: int, steps: int) -> None:
        context = multiprocessing.get_context("spawn")
        filler = context.Process(target=filled, args=(where, tokens, steps), daemon=True)
        filler.start()
        filler.join()
        assert filler.exitcode == 0
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(where, other), daemon=True)
        self.process.start()
        self.before = self.pipe.recv()

    def take(self, step: int) -> Any:
        from rft.buffer.delivery import opened

        self.pipe.send(("take", step))
        return opened(self.pipe.recv_bytes())

    def consumed(self, step: int) -> None:
        """The buffer knows."""

    def end(self) -> int:
        """By how many bytes the buffer has grown."""
        self.pipe.send(None)
        grown = int(self.pipe.recv()) - int(self.before)
        self.process.join()
        return grown


class Shown(Source):
    """The same one, which can be looked into."""

    def __init__(self, other: Source) -> None:
        self.pipe, self.process, self.before = other.pipe, other.process, other.before
        self.seen: dict[Any, Any] = {}

    def begin_look(self, step: int) -> None:
        self.pipe.send(("look", step))

    def look(self) -> Any:
        from rft.buffer.delivery import opened

        return opened(self.pipe.recv_bytes(), self.seen)

    def look_away(self) -> None:
        """All is there."""

    def take(self, step: int) -> Any:
        from rft.buffer.delivery import opened

        seen, self.seen = self.seen, {}
        self.pipe.send(("take", step, "trainer", None, list(seen)))
        return opened(self.pipe.recv_bytes(), seen)


def feed(source: Source | None, mesh: Any, tokens: int) -> Any:
    config = importlib.import_module("rft.config")
    algorithm = config.AlgorithmConfig(
        algorithm_type="grpo",
        advantage_fn="grpo",
        sample_strategy="default",
        loss_agg_mode="token-mean",
        policy_loss_fn="ppo",
    )
    module, packing = part("rft.trainer.feed", "rft.feed"), part("rft.data.packing", "rft.packing")
    cut = {"cut": packing.PackingPolicy(share=True)} if IS_NEW else {}
    return module.Feed(source, mesh, algorithm, 4 * tokens, TP, packing.Cost(), **cut)


def main() -> None:
    where, tokens, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    import torch

    from rft.config import MegatronConfig
    from rft.megatron.mesh import Mesh

    device = part("rft.ground.device", "rft.device").choose("cpu")
    device.activate()
    ahead = AHEAD if IS_NEW else 0
    source = Source(where, tokens, steps + ahead) if os.environ["RANK"] == "0" else None
    mesh = Mesh(MegatronConfig(TP), device, TIMEOUT_S)
    fed, seconds, before = feed(source, mesh, tokens), [], resident()
    grown = 0
    for step in range(steps + ahead):
        if step == steps and source is not None:
            source = Shown(source)
            fed = feed(source, mesh, tokens)
        if step > steps:
            time.sleep(TRAIN_S)  # as if they trained
        elif source is not None:
            forget_pages(where)
        mesh.barrier("begin")
        began = time.perf_counter()
        found = fed.next(step, False)
        for packed in found.part:  # one after the other, as they are trained on
            for name in ("tokens", "positions", "labels", "weight", "behaviour", "advantage"):
                torch.from_numpy(np.ascontiguousarray(getattr(packed, name)))
        mesh.barrier("end")
        seconds.append(time.perf_counter() - began)
        grown = resident() - before if step < steps else grown
        fed.consumed(step)
        del found, packed
    if source is not None:
        fed.close() if ahead else None
        told = {"seconds": seconds[:steps], "ahead": seconds[steps + 1 :]}
        told |= {"rank": grown, "buffer": source.end()}
        print(json.dumps({**told, "rft": importlib.import_module("rft").__file__}))
    mesh.close()


if __name__ == "__main__":
    main()
