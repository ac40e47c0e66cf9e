"""Experiences as JSON lines: a copy of what a queue stores, or all of a training run's input.

In: the experiences of groups, as stored. Out: one line per experience with every field of
`Experience` (token ids, versions, log-probabilities, masks), the lines of a group behind each
other; read back they are equal to what was stored, every bit. As a `feed.BatchSource` the file
gives a step its next groups, from the first on, so a resume at any step goes on exactly there.

Invariant: the journal is the truth and the copy follows it: what a crash left out or tore is mended
when the queue opens again.
"""

import math
import os
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

import msgspec

from rft.buffer.delivery import StoredGroup
from rft.buffer.progress import StepSize
from rft.config import ConfigError
from rft.data import remote
from rft.data.stateless import StatelessSource
from rft.ground import durable
from rft.ground.columns import listed, unpacked
from rft.ground.errors import unreadable
from rft.ground.experience import Batch, Experience, decode

KEY = "buffer.trainer_input.experience_buffer.path"
SUFFIXES = (".jsonl", ".json")
_encoder = msgspec.json.Encoder(enc_hook=listed)
_decoder = msgspec.json.Decoder(Experience, dec_hook=unpacked)


class _Group(msgspec.Struct):
    group: int = -1


_group_of = msgspec.json.Decoder(_Group)


def is_file(path: str | None) -> bool:
    """Whether a queue's `path` names such a file, and not the directory of its journal."""
    return path is not None and path.partition("#")[0].endswith(SUFFIXES)


def line_of(experience: Experience) -> bytes:
    return _encoder.encode(experience) + b"\n"


def lines_of(part: StoredGroup) -> bytes:
    """The lines of one group."""
    experiences = decode(part.experiences, list[Experience])
    for experience in experiences:
        experience.group, experience.timeline = part.group, part.timeline
    return b"".join(map(line_of, experiences))


def dump(parts: Iterable[StoredGroup], path: Path) -> int:
    """Write a file of these groups, whole or not at all; returns how many groups."""
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with durable.replacing(path) as file:
        for part in parts:
            file.write(lines_of(part))
            count += 1
    return count


class Copy:
    """The file at `path`, while a queue writes to it."""

    def __init__(self, path: str | Path, stored: Iterable[StoredGroup]) -> None:
        """`stored`: the groups that the queue has already; those that the file lacks are added."""
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        known = {part.group: part for part in stored}
        there = self._mended(known)
        self._file = self.path.open("ab")
        for group, part in sorted(known.items()):
            if group not in there:
                self.add(part)

    def _mended(self, known: dict[int, StoredGroup]) -> set[int]:
        """Cut off what a crash tore, which is the last group at most;
        returns the groups that are there.
        """
        if not self.path.exists():
            return set()
        starts: dict[int, int] = {}
        at = 0
        with self.path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    starts.setdefault(_group_of.decode(line).group, at)
                    at += len(line)
        last = max(starts, key=lambda group: starts[group], default=-1)
        if last in known:
            at = starts.pop(last)
        os.truncate(self.path, at)
        return set(starts)

    def add(self, part: StoredGroup) -> None:
        self._file.write(lines_of(part))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read(path: str | Path, key: str = KEY, sampled: bool = False) -> Iterator[list[Experience]]:
    """The groups of a file, in its order; raises ConfigError with file and line for one that cannot
    be trained on. `sampled`: nor can one that does not say how likely its tokens were.
    """
    if source := remote.source_of(str(path), SUFFIXES):
        for one in remote.files(source, "train", None, key.removesuffix(".path")):
            yield from read(one, key, sampled)
        return
    if said := unreadable(path):
        raise ConfigError(f"{key}: {said}")
    if not Path(path).is_file():
        raise ConfigError(
            f"{key}: {path} is no file: give the .jsonl that a run or `rft buffer dump` wrote"
        )
    with open(path, "rb") as file:
        found = (
            _experience(line, f"{key}: {path}, line {number}", sampled)
            for number, line in enumerate(file, 1)
            if line.strip()
        )
        for _, group in groupby(
            found, key=lambda experience: (experience.group, experience.task, experience.timeline)
        ):
            yield list(group)


def _experience(line: bytes, where: str, sampled: bool) -> Experience:
    try:
        found = _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{where}: no experience ({error}); write the file with `rft buffer dump`"
        ) from error
    response = found.response_length
    if found.prompt_length < 1 or response < 1:
        raise ConfigError(
            f"{where}: prompt_length={found.prompt_length} of {len(found.tokens)} "
            "tokens; correct it"
        )
    for name in ("action_mask", "logprobs", "token_rewards"):
        length = len(getattr(found, name))
        if length != response and (length or name == "action_mask"):
            raise ConfigError(
                f"{where}: {name} has {length} numbers for {response} tokens "
                "of the response; correct it"
            )
    if sampled and not len(found.logprobs) and any(found.action_mask):
        raise ConfigError(
            f"{where}: no logprobs of its {response} tokens, which the algorithm compares its own "
            "with: give those that they were sampled with, or take a loss without a ratio, like "
            "algorithm.policy_loss_fn=opmd"
        )
    if not all(math.isfinite(number) for number in (found.reward, *found.token_rewards)):
        raise ConfigError(f"{where}: reward={found.reward}; give a finite number")
    return found


def batches(groups: list[list[Experience]], size: StepSize) -> list[list[list[Experience]]]:
    """The groups of every step of one pass, in their order; those behind the last full step belong
    to none.
    """
    found: list[list[list[Experience]]] = []
    step, units = [], 0
    for group in groups:
        step.append(group)
        made = sum("baseline" not in experience.info for experience in group)
        units += 1 if size.experiences is None else max(made, 1)
        if units >= size.units:
            found.append(step)
            step, units = [], 0
    return found


def count_steps(
    path: str | Path, size: StepSize, sampled: bool = False, compared: bool = False
) -> tuple[int, int]:
    """(groups, full steps of a pass); also checks every line, as `read` does. `compared`: every
    group needs a greedy response.
    """
    groups = list(read(path, sampled=sampled))
    alone = [group for group in groups if not any("baseline" in one.info for one in group)]
    if compared and alone:
        raise ConfigError(
            f"{KEY}: {path}: group {alone[0][0].group} and {len(alone) - 1} more have no greedy "
            "response, with which algorithm.advantage_fn=remax compares: explore with it, or "
            "choose another one, like rloo"
        )
    return len(groups), len(batches(groups, size))


class ExperienceFile(StatelessSource):
    """`feed.BatchSource`: the file's groups, those of a step after the other, again from the first
    one when `total_steps` asks for more.
    """

    def __init__(self, path: str, size: StepSize, total_steps: int | None) -> None:
        groups = list(read(path))
        self.batches = batches(groups, size)
        self.total_steps = total_steps
        if not self.batches:
            raise ConfigError(too_few(path, len(groups), size))

    def batch(self, step: int) -> Batch:
        """The batch of `step`, which depends on nothing else; empty when the run is over."""
        if self.total_steps is not None and step >= self.total_steps:
            return Batch(step=step, experiences=[])
        groups = self.batches[step % len(self.batches)]
        return Batch(
            step=step, experiences=[experience for group in groups for experience in group]
        )


def too_few(path: str | Path, groups: int, size: StepSize) -> str:
    if size.experiences is None:
        what = f"buffer.batch_size={size.groups}"
    else:
        what = f"a step takes of experiences (buffer.train_batch_size), which is {size.experiences}"
    return f"{KEY}: {path} has {groups} groups, fewer than {what}: lower it"
