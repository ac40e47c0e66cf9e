"""`rft buffer dump`: the experiences that a run has stored, as JSON lines that `storage_type=file`
trains on.

In: a run's directory, a journal's, or the URL of a database, and where to write. Out: a file, whole
or not at all, and how many groups it has. It reads what the buffer keeps: groups that no retained
checkpoint needs any more are gone from there.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from rft.buffer.delivery import StoredGroup, facts_of
from rft.buffer.experience_file import SUFFIXES, dump
from rft.buffer.journal import JournalError
from rft.config import ConfigError
from rft.ground import redact

NAME = "experience_buffer"


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="rft buffer", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    dumping = commands.add_parser("dump", help="write the stored experiences to a file")
    dumping.add_argument(
        "source", help="a run's directory, a journal's directory, or the URL of a database"
    )
    dumping.add_argument("-o", "--output", required=True, help="the .jsonl to write")
    dumping.add_argument("--name", default=NAME, help=f"of the buffer; default {NAME}")
    given = parser.parse_args(words)
    try:
        if not given.output.endswith(SUFFIXES[0]):
            raise ConfigError(f"-o {given.output}: give a name that ends in {SUFFIXES[0]}")
        parts = (
            from_database(given.source, given.name)
            if "://" in given.source
            else from_journal(given.source, given.name)
        )
        count = dump(parts, Path(given.output))
    except (ConfigError, JournalError, OSError) as error:
        print(redact.text(f"rft buffer: {error}"), file=sys.stderr)
        return 1
    print(f"{given.output}: {count} groups")
    return 0


def from_journal(source: str, name: str) -> Iterator[StoredGroup]:
    from rft.buffer.ledger import Ledger

    places = (Path(source), Path(source) / "buffer" / name)
    # a run's directory has logs of another kind
    place = next((p for p in places if list(p.glob("[0-9]*.log"))), None)
    if place is None:
        raise ConfigError(
            f"{source} is no run with a queue, and no journal: "
            "give the run's directory, or the URL of its database"
        )
    ledger = Ledger(str(place), 64 * 2**20)
    try:
        yield from ledger.stored()
    finally:
        ledger.journal.close()


def versions_of(source: str, name: str) -> Counter[int]:
    """How many tokens of what a journal holds each policy version sampled."""
    tokens: Counter[int] = Counter()
    for part in from_journal(source, name):
        for row in facts_of(part.experiences):
            for span in row.versions:
                tokens[span.version] += span.end - span.start
    return tokens


def from_database(url: str, name: str) -> Iterator[StoredGroup]:
    from rft.buffer.sql_schema import Tables
    from rft.buffer.sql_tables import check_database, connect
    from rft.buffer.sql_turns import stored
    from rft.config import ExperienceBufferConfig

    check_database(ExperienceBufferConfig(storage_type="sql", name=name, path=url), to_read=True)
    engine = connect(url)
    try:
        with engine.connect() as connection:
            yield from stored(connection, Tables(name))
    finally:
        engine.dispose()
