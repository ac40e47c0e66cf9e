"""What a process bears of a database: how long anything may take there, and which errors pass.

In: a connection that is being opened; an error of the database. Out: limits on the connection;
whether to try again; what to tell. Invariant: no call waits for a database, or for whoever holds a
lock in it, without an end: PostgreSQL ends the session of a process that is stopped within a
transaction, so that its locks are free (SQLite cannot: there the call fails after its deadline).
"""

import sqlite3
from collections.abc import Callable

import sqlalchemy as sql

from rft.buffer.calls import BufferBroken
from rft.ground import redact

CONNECT_S = 10
STATEMENT_S = 60  # also for a batch of many large experiences
LOCK_S = 15  # to wait for a row that another transaction has locked
IDLE_S = 30  # a transaction whose process says nothing
ANSWER_S = 30  # a connection whose other end acknowledges nothing
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
