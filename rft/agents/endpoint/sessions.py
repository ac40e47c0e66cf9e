"""What clients were answered, as token sequences: conversations in, experiences out. No server, no
engine, no clock.

    request ──► `find`: does it go on from an answer given here?
            ──► prompt = the recorded ids + what is new
    answer  ──► `record`: the line grows, or a new one begins    ──► reward ──► `experiences`

A session is one run of an agent. Its answers lie in lines: a line is one token sequence that only
ever grew at its end. A request whose history is a recorded one, up to an answer that this server
gave, goes on from the ids of that answer; text that was sampled is never tokenized again. When a
client comes back to an earlier point, or changed what was said before it, a new line begins there:
it has what it shares with another line in its prompt.

Invariants: every sampled token is trained in exactly one experience, with the id, log-probability
and version that the engine gave; all that an experience holds before a sampled token is what the
engine saw before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rft.agents.endpoint.chat_format import Asked, canonical
from rft.ground.columns import Flags, Ids, LogProbs, TokenRewards, column
from rft.ground.experience import (
    Completion,
    Experience,
    RoutedExperts,
    Sampling,
    StopReason,
    VersionSpan,
)


@dataclass(frozen=True)
class ModelCall:
    """One sampled answer: tokens [start, end) of its line.

    `messages`: the conversation with it, empty for plain text.
    """

    id: str
    start: int
    end: int
    messages: tuple[dict[str, Any], ...]
    temperature: float
    stop: StopReason
    text: str


@dataclass
class Line:
    """`tokens` as the engine saw and sampled them; the lists have an entry per token behind
    `prompt_length`.
    """

    frame: str
    prompt_length: int
    tokens: list[int]
    action_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)
    calls: list[ModelCall] = field(default_factory=list)
    routed_experts: RoutedExperts | None = None

    @property
    def temperature(self) -> float | None:
        """The one of all that is trained; None while nothing is."""
        return next((call.temperature for call in self.calls if call.temperature > 0), None)

    def add(self, prompt: Sequence[int], made: Completion, call: ModelCall, chosen: Flags) -> None:
        """`prompt` begins with all tokens of this line."""
        between = prompt[len(self.tokens) :] if self.calls else ()
        at = len(self.tokens) + len(between) - self.prompt_length
        self.tokens += [*between, *made.ids]
        self.action_mask += [0] * len(between) + chosen.tolist()
        self.logprobs += [0.0] * len(between) + made.logprobs.tolist()
        self.versions += [
            VersionSpan(version=s.version, start=s.start + at, end=s.end + at)
            for s in made.versions
        ]
        self.routed_experts = RoutedExperts.joined(self.routed_experts, made.routed_experts)
        self.calls.append(call)


@dataclass(frozen=True)
class Continuation:
    """Behind answer `call` of `line`: where a request goes on."""

    line: Line
    call: int

    @property
    def tokens(self) -> list[int]:
        return self.line.tokens[: self.line.calls[self.call].end]

    def is_end(self) -> bool:
        return self.call == len(self.line.calls) - 1


@dataclass
class Feedback:
    """What was said of a session.

    `turns`: a reward per call, in their order; `tokens`: one per token of a single line.
    """

    reward: float | None = None
    turns: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.reward is not None or bool(self.turns or self.tokens)

    @property
    def total(self) -> float:
        """One number for the whole session: what is said of it, or else
        the sum of what is said of its parts.
        """
        return self.reward if self.reward is not None else float(sum(self.turns or self.tokens))


@dataclass
class Session:
    """One run of an agent. `sampling`: how answers are sampled where a request does not say."""

    id: str
    sampling: Sampling = field(default_factory=Sampling)
    lines: list[Line] = field(default_factory=list)
    calls: list[ModelCall] = field(default_factory=list)  # in the order of their answers
    feedback: Feedback = field(default_factory=Feedback)
    branches: int = 0  # lines that began although something was recorded
    too_long: list[int] | None = None  # a prompt that left no room for an answer

    def find(self, asked: Asked) -> Continuation | None:
        """Where the conversation goes on: the longest recorded one that
        it begins with, the newest of equals.
        """
        assert asked.messages is not None
        history = [canonical(message) for message in asked.messages]
        best, length = None, 0
        for line in self.lines:
            for number, call in enumerate(line.calls if line.frame == asked.frame else ()):
                known = len(call.messages)
                if (
                    length <= known <= len(history)
                    and known > 0
                    and list(call.messages) == history[:known]
                ):
                    best, length = Continuation(line, number), known
        return best

    def find_ids(self, prompt: list[int]) -> Continuation | None:
        """The same for a prompt of ids."""
        for line in reversed(self.lines):
            if len(line.tokens) <= len(prompt) and prompt[: len(line.tokens)] == line.tokens:
                return Continuation(line, len(line.calls) - 1)
        return None

    def record(
        self,
        asked: Asked,
        place: Continuation | None,
        prompt: list[int],
        made: Completion,
        text: str,
        *,
        id: str,
        answer: dict[str, Any] | None,
    ) -> ModelCall:
        """An answer.

        Its line is the one it went on from, if that has not grown since and is sampled alike.
        """
        line = place.line if place and place.is_end() else None
        temperature = asked.sampling.temperature
        if line is None or (temperature > 0 and line.temperature not in (None, temperature)):
            self.branches += bool(self.lines)
            line = Line(asked.frame, len(prompt), list(prompt))
            self.lines.append(line)
        end = len(prompt) + len(made.tokens)
        said: tuple[dict[str, Any], ...] = ()
        if answer is not None:  # of a long conversation each message is kept once
            known = place.line.calls[place.call].messages if place else ()
            said = (*known, *map(canonical, (asked.messages or [])[len(known) :]), answer)
        call = ModelCall(id, len(prompt), end, said, temperature, made.stop, text)
        line.add(prompt, made, call, made.chosen(asked.sampling))
        self.calls.append(call)
        return call

    def experiences(self, merge: bool = True) -> list[Experience]:
        """Of all that was answered: one per line, or per answer (`merge=False`).

        Rewards are those of `feedback`.
        """
        made = []
        for line in self.lines:
            made += (
                [self._whole(line)] if merge else [self._alone(line, call) for call in line.calls]
            )
        if not made and self.too_long is not None:
            prompt = self.too_long
            made = [
                Experience(
                    tokens=column(Ids, prompt),
                    prompt_length=len(prompt),
                    action_mask=column(Flags, []),
                    stop="prompt_too_long",
                )
            ]
        for number, experience in enumerate(made):
            experience.turn = number
            experience.metrics = {**experience.metrics, **self.feedback.metrics}
            experience.info = {"session": self.id, **self.feedback.info}
        return made

    def _whole(self, line: Line) -> Experience:
        last = line.calls[-1]
        experience = Experience(
            tokens=column(Ids, line.tokens),
            prompt_length=line.prompt_length,
            action_mask=column(Flags, line.action_mask),
            logprobs=column(LogProbs, line.logprobs),
            versions=line.versions,
            temperature=line.temperature or 1.0,
            stop="length" if self.too_long else last.stop,
            routed_experts=line.routed_experts,
            metrics={"turns": float(len(line.calls))},
        )
        if self.feedback.turns:
            experience.token_rewards = np.zeros(experience.response_length)
            for call in filter(lambda one: one.end > one.start, line.calls):
                experience.token_rewards[call.end - 1 - line.prompt_length] = self._of_turn(call)
        elif self.feedback.tokens:
            experience.token_rewards = column(TokenRewards, self.feedback.tokens)
        return self._rewarded(experience, self.feedback.total)

    def _alone(self, line: Line, call: ModelCall) -> Experience:
        start, end = call.start - line.prompt_length, call.end - line.prompt_length
        spans = [
            VersionSpan(version=s.version, start=s.start - start, end=s.end - start)
            for s in line.versions
            if start <= s.start and s.end <= end
        ]
        experience = Experience(
            tokens=column(Ids, line.tokens[: call.end]),
            prompt_length=call.start,
            action_mask=column(Flags, line.action_mask[start:end]),
            logprobs=column(LogProbs, line.logprobs[start:end]),
            versions=spans,
            temperature=call.temperature or 1.0,
            stop=call.stop,
            routed_experts=line.routed_experts and line.routed_experts.first(call.end - 1),
        )
        return self._rewarded(
            experience, self._of_turn(call) if self.feedback.turns else self.feedback.total
        )

    def _rewarded(self, experience: Experience, reward: float) -> Experience:
        experience.reward, experience.reward_outcome = reward, "ok" if self.feedback else "none"
        return experience

    def _of_turn(self, call: ModelCall) -> float:
        return self.feedback.turns[self.calls.index(call)]

    def forget(self) -> None:
        """What was recorded was taken: a conversation that goes on begins a new line."""
        self.lines, self.calls = [], []

    def check(self, feedback: Feedback) -> None:
        """Raises ValueError for rewards of other turns or tokens than there are."""
        if feedback.turns and len(feedback.turns) != len(self.calls):
            raise ValueError(
                f"{len(feedback.turns)} rewards for the {len(self.calls)} answers of session "
                f"{self.id}"
            )
        if not feedback.tokens:
            return
        lengths = [len(line.tokens) - line.prompt_length for line in self.lines]
        if lengths != [len(feedback.tokens)]:
            raise ValueError(
                f"{len(feedback.tokens)} rewards of tokens for session {self.id}, whose sequences "
                f"have {lengths} behind the prompt"
            )
