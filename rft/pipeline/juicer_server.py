"""A Data-Juicer service that this run starts and ends: `service.data_juicer.auto_start`.

In: the section of the config. Out: the URL at which the process that was started here answers. Invariants: the start ends within
`start_timeout` (the reference waits for ever: W49), with a service or with the end of its log; a port is not taken on trust: the
answer must come from a process of ours; nothing of it is left after `stop`, nor after the death of the process that started it.
"""

import asyncio
import contextlib
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil

from rft.config import DataJuicerConfig
from rft.monitor.logs import ending
from rft.pipeline.juicer_client import JuicerClient, JuicerError

log = logging.getLogger(__name__)
COMMAND = "{python} -m trinity.service.data_juicer.server.server --host 127.0.0.1 --port {port}"
TRIES = 3  # with another port each
LOOK_S = 0.1  # between two questions whether it serves: nothing tells
ANSWER_S = 5.0
END_S = 10.0
LAST_LINES = 3


class PortTaken(JuicerError):
    """Somebody else was faster."""


class JuicerServer:
    """`log_file`: where it prints to."""

    def __init__(self, config: DataJuicerConfig, log_file: Path) -> None:
        self.config, self.log_file = config, log_file
        self.process: subprocess.Popen[bytes] | None = None

    async def start(self) -> str:
        """Raises JuicerError."""
        try:
            async with asyncio.timeout(self.config.start_timeout):
                for number in range(TRIES):
                    port = self._port(number)
                    try:
                        return await self._start_at(port)
                    except PortTaken as error:
                        log.warning("%s", error)
        except TimeoutError:
            raise JuicerError(
                f"the Data-Juicer service did not answer in {self.config.start_timeout:g} s "
                f"(service.data_juicer.start_timeout); its log is {self.log_file}{self._last()}"
            ) from None
        finally:
            if self.process is not None and not self.is_serving:
                await asyncio.to_thread(self.stop)
        raise JuicerError(
            f"the Data-Juicer service ended {TRIES} times before it served; its log is {self.log_file}{self._last()}"
        )

    is_serving = False

    def stop(self) -> None:
        """Kill it with all that it started."""
        if self.process is None:
            return
        family = self._family()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(END_S)
        psutil.wait_procs(family, timeout=END_S)
        self.process, self.is_serving = None, False

    async def _start_at(self, port: int) -> str:
        command = (self.config.command or COMMAND).format(port=port, python=shlex.quote(sys.executable))
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        with self.log_file.open("ab") as output:  # on a leash: it dies with this process, whatever kills that
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rft.pipeline.leash", str(os.getpid()), *shlex.split(command)],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )  # fmt: skip
        client = JuicerClient(f"http://127.0.0.1:{port}", ANSWER_S)
        try:
            while True:
                code = self.process.poll()
                if code is not None:
                    self.process = None
                    raise PortTaken(f"the Data-Juicer service {ending(code)} at port {port}{self._last()}")
                try:
                    await client.health()
                except JuicerError:
                    await asyncio.sleep(LOOK_S)
                    continue
                if not self._listens(port):
                    await asyncio.to_thread(self.stop)
                    raise PortTaken(f"another process answers at port {port}")
                self.is_serving = True
                return client.url
        finally:
            await client.close()

    def _port(self, number: int) -> int:
        """The one of the config if it is free; else one that nobody gets by chance for a minute; at last any free one."""
        wanted = self.config.port
        if wanted and number == 0:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("127.0.0.1", wanted))
                    return wanted
                except OSError:
                    log.warning("service.data_juicer.port=%d is in use: taking a free one", wanted)
        return free_port(reserve=number < TRIES - 1)

    def _family(self) -> list[psutil.Process]:
        assert self.process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            head = psutil.Process(self.process.pid)
            return [head, *head.children(recursive=True)]
        return []

    def _listens(self, port: int) -> bool:
        """Whether a process of ours has the port."""
        for process in self._family():
            with contextlib.suppress(psutil.NoSuchProcess):
                for link in process.net_connections("tcp"):
                    if link.status == psutil.CONN_LISTEN and link.laddr.port == port:
                        return True
        return False

    def _last(self) -> str:
        """The end of its log."""
        if not self.log_file.exists():
            return ""
        lines = self.log_file.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
        return f", which ends with: {' | '.join(lines)}" if lines else ""


def free_port(reserve: bool = True) -> int:
    """A port that is free. `reserve`: a connection of its own that has just ended keeps the kernel from giving it to anybody
    who asks for any port, while a server that asks for this one (with SO_REUSEADDR, as servers do) gets it.
    """
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reserve))
        server.bind(("127.0.0.1", 0))
        if reserve:
            server.listen(1)
            with socket.create_connection(server.getsockname()) as client:
                server.accept()[0].close()  # the side that closes first is the one that lingers
                client.recv(1)
        return int(server.getsockname()[1])
