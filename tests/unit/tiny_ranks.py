"""A launcher of two ranks, and the ranks, of which one may die once: python tiny_ranks.py DIRECTORY
PORT RESTARTS.
"""

import json
import os
import signal
import sys
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from rft import config as configs
from rft.run import elastic
from rft.run.restarts import Restarts

NAME = "tiny"


def launch(directory: str, port: int, restarts: int) -> None:
    config = configs.Config(name=NAME, shutdown_grace_s=20.0)
    config.trainer.num_ranks, config.cluster.master_port = 2, port
    failed = elastic.until_ended(
        lambda: elastic.run(config, __file__, directory, str(restarts)),
        Restarts(restarts),
        Path(directory),
        print,
    )
    sys.exit(json.dumps(failed) if failed else 0)


def rank(directory: Path, restarts: int) -> None:
    """One of the two; a start loses rank 1 if another may follow."""
    dist.init_process_group("gloo")
    starts, number = directory / "starts", dist.get_rank()
    start = len(starts.read_text()) if starts.exists() else 0
    total = torch.ones(1)
    dist.all_reduce(total)
    if number == 1 and start < restarts:
        starts.write_text("x" * (start + 1))
        os.kill(os.getpid(), signal.SIGKILL)
    launcher = psutil.Process(os.getppid())
    told = {
        "total": int(total),
        "start": start,
        "at": f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
    }
    told |= {
        "of_launcher": listening(launcher),
        "of_ranks": [at for one in launcher.children() for at in listening(one)],
    }
    (directory / f"rank_{number}.json").write_text(
        json.dumps(told | {"rendezvous": rendezvous_keys(launcher)})
    )
    dist.barrier()
    dist.destroy_process_group()


def listening(process: psutil.Process) -> list[str]:
    return [at.laddr.ip for at in process.net_connections("tcp") if at.status == psutil.CONN_LISTEN]


def rendezvous_keys(launcher: psutil.Process) -> list[int]:
    """Ports of the launcher's that give the pickled state of
    torch's own rendezvous to whoever asks.
    """
    ports = [
        at.laddr.port for at in launcher.net_connections("tcp") if at.status == psutil.CONN_LISTEN
    ]
    stores = [
        dist.TCPStore("localhost", port, is_master=False, wait_for_workers=False) for port in ports
    ]
    return [store.port for store in stores if store.check([f"torch.rendezvous.{NAME}"])]


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank(Path(sys.argv[1]), int(sys.argv[2]))
    else:
        launch(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
