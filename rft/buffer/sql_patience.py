"""What a process bears of a database: how long anything may take there, and which errors pass.

In: a connection that is being opened; an error of the database. Out: limits on the connection;
whether to try again; what to tell. Invariant: no call waits for a database, or for whoever holds a
lock in it, without an end: PostgreSQL ends the session of a process that is stopped within a
transaction, so that its locks are free (SQLite cannot: there the call fails after its deadline). A
server that is stopped, or a proxy that hands nothing on, keeps its connections open and answers the
kernel's probes: there the client itself ends the wait (`patient`).
"""

import functools
import sqlite3
import time
from collections.abc import Callable, Generator
from typing import Any

import sqlalchemy as sql

from rft.buffer.calls import BufferBroken
from rft.ground import redact

CONNECT_S = 10
STATEMENT_S = 60  # also for a batch of many large experiences
LOCK_S = 15  # to wait for a row that another transaction has locked
IDLE_S = 30  # a transaction whose process says nothing
ANSWER_S = 30  # a connection whose other end acknowledges nothing
CALL_S = STATEMENT_S + 5.0  # for an answer: the server would have ended the statement by then
RETRY_S = 45.0  # a call that others wait for; less than rank 0 waits for an answer
NAP_S, LONGEST_NAP_S = 0.05, 2.0  # between two tries
KEEPALIVE = {"idle": 10, "interval": 5, "count": 4}  # seconds, seconds, probes

PASSES = ("08", "40", "53", "57")  # connections, deadlocks, resources, operator and time limits
PASSES_TOO = ("25P03", "55P03")  # idle in a transaction, a lock that is held
SQLITE_PASSES = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL)


def client_limits(given: Callable[[str], bool]) -> dict[str, int]:
    """Arguments of a connection to PostgreSQL, but those that its URL has `given`."""
    found = {
        "connect_timeout": CONNECT_S,
        "tcp_user_timeout": ANSWER_S * 1000,
        "keepalives": 1,
        **{f"keepalives_{name}": value for name, value in KEEPALIVE.items()},
    }
    return {name: value for name, value in found.items() if not given(name)}


def server_limits() -> dict[str, int]:
    """What the server is to hold a session to: milliseconds, or as the name says."""
    return {
        "statement_timeout": int(STATEMENT_S * 1000),
        "lock_timeout": int(LOCK_S * 1000),
        "idle_in_transaction_session_timeout": int(IDLE_S * 1000),
        "tcp_user_timeout": int(ANSWER_S * 1000),
        **{f"tcp_keepalives_{name}": value for name, value in KEEPALIVE.items()},
    }


@functools.cache
def patient() -> Any:
    """A class of psycopg's connections, of which each answer has CALL_S; a connection that is
    silent for longer is closed, and raises OperationalError.
    """
    import psycopg

    class Patient(psycopg.Connection[Any]):
        def wait(self, gen: Any, *args: Any, **kwargs: Any) -> Any:
            return super().wait(self._limited(gen), *args, **kwargs)

        def _limited(self, gen: Any) -> Generator[Any, Any, Any]:
            """psycopg sends 0 now and then where nothing has come."""
            deadline = time.monotonic() + CALL_S
            try:
                wanted = next(gen)
                while True:
                    ready = yield wanted
                    if not ready and time.monotonic() > deadline:
                        self.pgconn.finish()
                        raise psycopg.OperationalError(f"no answer in {CALL_S:g} s")
                    wanted = gen.send(ready)
            except StopIteration as end:
                return end.value

    return Patient


def passes(error: sql.exc.SQLAlchemyError) -> bool:
    """Whether the same call may succeed later: a lock, a deadlock, a lost connection, a full disk.

    Its transaction was not committed, or it was and the answer got lost.
    """
    if isinstance(error, sql.exc.TimeoutError):  # of the connections, all are in use
        return True
    if not isinstance(error, sql.exc.DBAPIError):
        return False
    cause = error.orig
    if isinstance(cause, sqlite3.Error):
        return getattr(cause, "sqlite_errorcode", 0) & 0xFF in SQLITE_PASSES
    code = getattr(cause, "sqlstate", None)
    if code is None:  # the connection, not the server, failed
        return error.connection_invalidated or isinstance(error, sql.exc.OperationalError)
    return error.connection_invalidated or code[:2] in PASSES or code in PASSES_TOO


def failure(error: sql.exc.SQLAlchemyError) -> BufferBroken:
    """In one line, without the statement's values."""
    cause = str(getattr(error, "orig", None) or error).strip().splitlines()
    return BufferBroken(
        "the experience buffer's database failed: "
        f"{redact.text(cause[0] if cause else type(error).__name__)}"
    )
