"""Which sessions there are, who may use them, and what becomes of them: keys in, sessions out;
rewards in, groups out.

    workflow  ── open ──► session and its key ──► agent ... calls, feedback
            ──► close: the workflow takes the experiences
    anybody   ── token ─► session by name (mode=serve) ... feedback(task) ──► groups of one task
            ──► store, durably

A key opens one session, the token every one. Where a session is not given a reward it expires, and
is counted. Invariants: no key opens another session than its own; a session gives its experiences
once; storing that has begun goes on, whether or not the client waits for it; a group that was
acknowledged as stored is, and one that could not be stored is kept as it is and tried again; a
session's own key posts its reward only where whoever opened it said so.
"""

import asyncio
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import numpy as np

from rft.agents.endpoint.chat_format import ApiError
from rft.agents.endpoint.sessions import Feedback, Session
from rft.ground.experience import Experience, Sampling
from rft.rollout.answers import RunAnswers
from rft.rollout.served import ServedGroup

log = logging.getLogger(__name__)
AGAIN_S = 30.0  # between looks at what is late, and tries to store what could not be
NAME = re.compile(r"[\w.@-]{1,128}")
Store = Callable[[ServedGroup], Awaitable[None]]  # the same one again is stored once


@dataclass
class OpenedSession:
    """A session in use. `under_way`: requests that are being answered. `may_reward`: its own key
    posts its reward.
    """

    session: Session
    touched: float
    under_way: int = 0
    may_reward: bool = False
    answers: RunAnswers | None = None  # of the workflow's run that opened it
    rewarded: asyncio.Event = field(default_factory=asyncio.Event)


class Registry:
    """`store` is None where only workflows open sessions.

    `group_size`: sessions of one task that are stored together.
    """

    def __init__(self, token: str, timeout: float, store: Store | None = None, group_size: int = 1):
        self.token = token
        self.timeout = timeout
        self.store = store
        self.group_size = group_size
        self.open_: dict[str, OpenedSession] = {}
        self.counts: Counter[str] = Counter()
        self._groups: dict[str, list[list[Experience]]] = {}  # of tasks whose group is not whole
        self._began: dict[str, float] = {}
        self._unstored: list[ServedGroup] = []  # that could not be, as far as anybody heard
        self._storing: dict[asyncio.Task[Exception | None], ServedGroup] = {}

    # --- who may ----------------------------------------------------------------------------------

    def key(self, session: str) -> str:
        """Opens this session and nothing else."""
        words = session.encode(errors="replace")
        signature = hmac.new(self.token.encode(), words, hashlib.sha256)
        return f"{session}:{signature.hexdigest()[:40]}"

    def admit(self, key: str, named: str | None) -> str | None:
        """The session that a request with `key` belongs to;
        None: it names none, and may use any.
        """
        name, _, rest = key.rpartition(":")
        if self._is_runs(key):
            own = rest if not self._is_token(key) else None
        elif name and hmac.compare_digest(key.encode(errors="replace"), self.key(name).encode()):
            if named not in (None, name):
                raise ApiError(
                    "this key belongs to another session", status=403, code="invalid_api_key"
                )
            own = name
        else:
            raise ApiError("wrong or missing API key", status=401, code="invalid_api_key")
        found = named if named is not None else own
        if found is not None and not NAME.fullmatch(found):
            raise ApiError(
                "a session's name has letters, digits and . @ - _, at most 128", "session"
            )
        return found

    def _is_token(self, key: str) -> bool:
        # a header may hold bytes that are no text
        return hmac.compare_digest(key.encode(errors="replace"), self.token.encode())

    def _is_runs(self, key: str) -> bool:
        """The run's own key, or that with a session's name behind it."""
        return self._is_token(key) or self._is_token(key.rpartition(":")[0])

    def check_may_reward(self, key: str, session: str) -> None:
        """Raises ApiError: a program that is paid by its reward does not write it itself."""
        found = self.open_.get(session)
        if not self._is_runs(key) and found is not None and not found.may_reward:
            raise ApiError(
                "this session's key does not post its reward: use the run's own key, or set "
                "workflow_args.agent_posts_reward=true",
                "reward",
                status=403,
            )

    # --- sessions ---------------------------------------------------------------------------------

    def open(
        self,
        name: str | None = None,
        sampling: Sampling | None = None,
        may_reward: bool = False,
        answers: RunAnswers | None = None,
    ) -> Session:
        session = Session(name or uuid.uuid4().hex, sampling or Sampling())
        now = time.monotonic()
        self.open_[session.id] = OpenedSession(session, now, may_reward=may_reward, answers=answers)
        self.counts["sessions"] += 1
        return session

    def _get(self, name: str | None, unrecorded: bool) -> OpenedSession:
        """The session of a request; where anybody may, a new name begins one."""
        if name is None and unrecorded:
            return OpenedSession(
                Session(uuid.uuid4().hex, Sampling()), time.monotonic()
            )  # of this request alone: nothing is kept
        if name is not None and name in self.open_:
            found = self.open_[name]
        elif self.store is not None:
            found = self.open_[self.open(name).id]
        else:
            raise ApiError(
                f"there is no session {name}" if name else "this key names no session",
                "session",
                status=404,
            )
        return found

    def enter(self, name: str | None, unrecorded: bool = False) -> OpenedSession:
        """The same for a request; it does not expire before `leave`.

        `unrecorded`: it needs no session, having no rewards.
        """
        found = self._get(name, unrecorded)
        found.under_way += 1
        return found

    def leave(self, found: OpenedSession) -> None:
        found.under_way -= 1
        found.touched = time.monotonic()

    def close(self, name: str) -> None:
        self.open_.pop(name, None)

    # --- rewards ----------------------------------------------------------------------------------

    async def feedback(
        self, name: str, feedback: Feedback, task: str | None = None
    ) -> tuple[int, bool]:
        """A reward for a session.

        Returns (experiences that it made here, whether they are stored).
        """
        found = self.open_.get(name)
        if found is None:
            raise ApiError(
                f"there is no session {name}: it was never used, has its reward or is over",
                "session",
                status=404,
            )
        try:
            found.session.check(feedback)
        except ValueError as error:
            raise ApiError(str(error), "turn_rewards") from error
        found.session.feedback = feedback
        found.rewarded.set()
        self.counts["feedbacks"] += 1
        if self.store is None:
            return 0, False
        return await self._finish(found, task)

    async def _finish(self, found: OpenedSession, task: str | None) -> tuple[int, bool]:
        session = found.session
        made = [one for one in session.experiences() if np.any(one.action_mask)]
        self.close(session.id)
        if not made:
            raise ApiError(
                f"session {session.id} has nothing to learn from: no sampled answer",
                "session",
                status=409,
            )
        name = session.id if task is None else task
        self._groups.setdefault(name, []).append(made)
        self._began.setdefault(name, time.monotonic())
        is_whole = task is None or len(self._groups[name]) >= self.group_size
        if not is_whole:
            return len(made), False
        return len(made), await asyncio.shield(self._begin(self._closed(name))) is None

    async def commit(self, tasks: list[str] | None = None) -> int:
        """Store the groups of these tasks, or of all, as they are; returns how many. One that
        cannot be stored is kept. Those that somebody else stores now are not waited for.
        """
        failed = self._again(lambda group: tasks is None or group.task in tasks)
        whole = [task for task in self._groups if tasks is None or task in tasks]
        jobs = [*failed, *(self._begin(self._closed(task)) for task in whole)]
        for job in jobs:
            if (error := await asyncio.shield(job)) is not None:
                raise error
        return len(jobs)

    async def end(self, within_s: float) -> None:
        """Let what is being stored be stored, for so long."""
        if self._storing:
            await asyncio.wait(self._storing, timeout=within_s)
        for group in (*self._storing.values(), *self._unstored):
            log.error("the group of %s may not be stored: the service ends", group.task)
        for job in self._storing:
            job.cancel()

    def _closed(self, task: str) -> ServedGroup:
        """What there is of it: sessions that come later are another group's."""
        sessions = self._groups.pop(task)
        del self._began[task]
        for sample, made in enumerate(sessions):
            for experience in made:
                experience.sample = sample
        return ServedGroup(task, [experience for made in sessions for experience in made])

    def _again(self, chosen: Callable[[ServedGroup], bool]) -> list[asyncio.Task[Exception | None]]:
        """Try to store what could not be stored."""
        found = [group for group in self._unstored if chosen(group)]
        self._unstored = [group for group in self._unstored if group not in found]
        return [self._begin(group) for group in found]

    def _begin(self, group: ServedGroup) -> "asyncio.Task[Exception | None]":
        """Store it, whether or not anybody waits for that; the result as of `_store`."""
        job = asyncio.create_task(self._store(group))
        self._storing[job] = group
        job.add_done_callback(self._storing.pop)
        return job

    async def _store(self, group: ServedGroup) -> Exception | None:
        """Why it is not stored, but kept, as far as anybody heard; None: it is stored."""
        assert self.store is not None
        try:
            await self.store(group)
        except Exception as error:
            log.exception("the group of %s could not be stored: it is tried again", group.task)
            self.counts["store_failures"] += 1
            self._unstored.append(group)
            return error
        self.counts["groups"] += 1
        self.counts["experiences"] += len(group.experiences)
        return None

    async def expire(self) -> None:
        """Go on for ever: end sessions that nobody has used for `timeout` seconds, and store groups
        that have waited as long.
        """
        while True:
            ages = [one.touched for one in self.open_.values() if not one.under_way]
            ages += self._began.values()
            next_ = min(ages, default=time.monotonic()) + self.timeout - time.monotonic()
            await asyncio.sleep(max(0.05, min(next_, AGAIN_S)))
            late = time.monotonic() - self.timeout
            for name, one in list(self.open_.items()):
                if one.touched <= late and not one.under_way:
                    self.close(name)
                    self.counts["expired"] += 1
            self._again(lambda _: True)
            for task in [task for task, began in self._began.items() if began <= late]:
                self._begin(self._closed(task))

    def stats(self) -> dict[str, float]:
        names = (
            "requests",
            "answers",
            "tokens",
            "sessions",
            "expired",
            "feedbacks",
            "groups",
            "experiences",
            "branches",
            "refused",
            "store_failures",
        )
        waiting = len(self._groups) + len(self._unstored) + len(self._storing)
        found = {f"endpoint/{name}": float(self.counts[name]) for name in names}
        return found | {
            "endpoint/open_sessions": float(len(self.open_)),
            "endpoint/waiting_groups": float(waiting),
        }
