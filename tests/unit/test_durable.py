"""Locks of files, held by real processes."""

import signal
import subprocess
import sys
from pathlib import Path

from rft.ground import durable

HOLDER = """
import signal, sys
from pathlib import Path
from rft.ground import durable
print("waits", flush=True)
print(durable.lock(Path(sys.argv[1]), wait_s=60.0), flush=True)
signal.pause()
"""


def hold(path: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", HOLDER, str(path)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"waits\n"
    return holder


def test_a_lock_is_waited_for_and_goes_with_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with hold(path) as first:
        assert int(first.stdout.readline()) > 2  # type: ignore[union-attr]
        assert durable.is_locked(path) and durable.lock(path) is None
        with hold(path) as second:
            first.send_signal(signal.SIGKILL)
            assert int(second.stdout.readline()) > 2  # type: ignore[union-attr]
            assert durable.lock(path) is None
            assert durable.lock(path, wait_s=2 * durable.LOOK_S) is None, (
                "it is not waited for ever"
            )
            second.kill()
    assert not durable.is_locked(path)
