"""Which sessions there are, who may use them, and what becomes of them: keys in, sessions out;
rewards in, groups out.

    workflow  ── open ──► session and its key ──► agent ... calls, feedback
            ──► close: the workflow takes the experiences
    anybody   ── token ─► session by name (mode=serve) ... feedback(task) ──► groups of one task
            ──► store, durably

A key opens one session, the token every one. Where a session is not given a reward it expires, and
is counted. Invariants: no key opens another session than its own; a session gives its experiences
once; a group that was acknowledged as stored is.
"""

import asyncio
import hashlib
import hmac
import re
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from rft.agents.endpoint.chat_format import ApiError
from rft.agents.endpoint.sessions import Feedback, Session
from rft.ground.experience import Experience, Sampling

NAME = re.compile(r"[\w.@-]{1,128}")
Store = Callable[[str, list[Experience]], Awaitable[None]]  # (name of the task, its experiences)


@dataclass
class OpenedSession:
    """A session in use. `under_way`: requests that are being answered."""

    session: Session
    touched: float
    under_way: int = 0
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

    # --- who may ----------------------------------------------------------------------------------

    def key(self, session: str) -> str:
        """Opens this session and nothing else."""
        signature = hmac.new(self.token.encode(), session.encode(), hashlib.sha256)
        return f"{session}:{signature.hexdigest()[:40]}"

    def admit(self, key: str, named: str | None) -> str | None:
        """The session that a request with `key` belongs to;
        None: it names none, and may use any.
        """
        name, _, rest = key.rpartition(":")
        if hmac.compare_digest(key.encode(), self.token.encode()):
            own = None
        elif name and hmac.compare_digest(name.encode(), self.token.encode()):
            own = rest
        elif name and hmac.compare_digest(key.encode(), self.key(name).encode()):
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

    # --- sessions ---------------------------------------------------------------------------------

    def open(self, name: str | None = None, sampling: Sampling | None = None) -> Session:
        session = Session(name or uuid.uuid4().hex, sampling or Sampling())
        self.open_[session.id] = OpenedSession(session, time.monotonic())
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
        made = [one for one in session.experiences() if any(one.action_mask)]
        self.close(session.id)
        if not made:
            raise ApiError(
                f"session {session.id} has nothing to learn from: no sampled answer",
                "session",
                status=409,
            )
        if task is None:
            await self._store(session.id, [made])
            return len(made), True
        self._groups.setdefault(task, []).append(made)
        self._began.setdefault(task, time.monotonic())
        is_whole = len(self._groups[task]) >= self.group_size
        if is_whole:
            await self.commit([task])
        return len(made), is_whole

    async def commit(self, tasks: list[str] | None = None) -> int:
        """Store the groups of these tasks, or of all, as they are; returns how many."""
        chosen = [
            task
            for task in (tasks if tasks is not None else list(self._groups))
            if task in self._groups
        ]
        for task in chosen:
            self._began.pop(task)
            await self._store(task, self._groups.pop(task))
        return len(chosen)

    async def _store(self, task: str, sessions: list[list[Experience]]) -> None:
        assert self.store is not None
        for sample, made in enumerate(sessions):
            for experience in made:
                experience.sample = sample
        flat = [experience for made in sessions for experience in made]
        await self.store(task, flat)
        self.counts["groups"] += 1
        self.counts["experiences"] += len(flat)

    async def expire(self) -> None:
        """Go on for ever: end sessions that nobody has used for `timeout` seconds, and store groups
        that have waited as long.
        """
        while True:
            ages = [one.touched for one in self.open_.values() if not one.under_way] + list(
                self._began.values()
            )
            await asyncio.sleep(
                max(0.05, min(ages, default=time.monotonic()) + self.timeout - time.monotonic())
            )
            late = time.monotonic() - self.timeout
            for name, one in list(self.open_.items()):
                if one.touched <= late and not one.under_way:
                    self.close(name)
                    self.counts["expired"] += 1
            await self.commit([task for task, began in self._began.items() if began <= late])

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
        )
        found = {f"endpoint/{name}": float(self.counts[name]) for name in names}
        return found | {
            "endpoint/open_sessions": float(len(self.open_)),
            "endpoint/waiting_groups": float(len(self._groups)),
        }
