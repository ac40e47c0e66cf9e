"""What the processes of a run listen at, from the kernel; and what docs/security.md says of it.

The page's first table is read: who (a pattern of a process's command line), where (an address, or
`unix`), in which runs. Whatever listens and is in no row is a finding, and so is a row of every run
that nobody listens for.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import psutil

PAGE = Path(__file__).resolve().parents[2] / "docs" / "security.md"
ACCEPTS = 0x10000  # flag of a socket in /proc/net/unix


class Socket(NamedTuple):
    process: str  # its command line
    address: str  # an IP address; or unix:PATH, unix:@NAME


class Row(NamedTuple):
    who: str
    address: str
    when: str

    def is_of(self, one: Socket) -> bool:
        where = "unix" if one.address.startswith("unix:") else one.address
        known = {"HOST" if one.address in _own() else where, where}
        there = bool(known & set(self.address.split(", ")))
        return there and re.search(self.who, one.process) is not None


def listening(processes: Iterable[psutil.Process]) -> set[Socket]:
    unix = _unix()
    found = set()
    for process in processes:
        try:
            command = " ".join(process.cmdline())
            for link in process.net_connections("tcp"):
                if link.status == psutil.CONN_LISTEN:
                    found.add(Socket(command, link.laddr.ip))
            directory = f"/proc/{process.pid}/fd"
            for name in os.listdir(directory):
                target = os.readlink(f"{directory}/{name}")
                if target.startswith("socket:[") and target[8:-1] in unix:
                    found.add(Socket(command, f"unix:{unix[target[8:-1]]}"))
        except (psutil.Error, OSError):  # it has just ended, or one of its sockets has
            continue
    return found


def _own() -> set[str]:
    """Addresses of this machine."""
    links = psutil.net_if_addrs().values()
    return {one.address for link in links for one in link if not one.address.startswith("127.")}


def _unix() -> dict[str, str]:
    """Names of Unix sockets that accept connections, by inode."""
    found = {}
    for line in Path("/proc/net/unix").read_text(encoding="utf-8").splitlines()[1:]:
        words = line.split(maxsplit=7)
        if int(words[3], 16) & ACCEPTS:
            found[words[6]] = words[7] if len(words) > 7 else ""
    return found


def rows() -> list[Row]:
    table = PAGE.read_text(encoding="utf-8").split("| who |", 1)[1].split("\n\n", 1)[0]
    lines = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    # `\|` is how a table writes the sign between its columns
    return [
        Row(one[0].strip("` ").replace("\\|", "|"), one[1].strip("` "), one[2].strip())
        for one in lines
    ]


def strange(found: Iterable[Socket], known: list[Row]) -> list[Socket]:
    return [one for one in found if not any(row.is_of(one) for row in known)]


def absent(found: Iterable[Socket], known: list[Row]) -> list[Row]:
    found = list(found)
    return [row for row in known if row.when == "every" and not any(map(row.is_of, found))]
