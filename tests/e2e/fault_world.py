"""A whole weight sync in real processes, any of which can be killed at any point: two trainer
ranks, engines, a synchronizer, a client that asks for tokens all the time. What rank 0 and the
supervisor do in a run is done here, by the test.

In: `Fault`s. Out: assertions, and a `Tally` of what was seen. After every fault the world is whole
again, holds new weights that came in a clean round, and everything that its engines have said was
judged.
"""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import ray
from fault_client import Client
from fault_judge import Judge
from fault_ranks import TrainerRanks
from mortal import MortalEngine, MortalSynchronizer

from rft.config import ModelConfig, RolloutModelConfig
from rft.ground.process import end_marked
from rft.ground.protocols import ActorHandle

SYNC_S = 60.0  # sync_timeout
ANSWER_S = 120.0
START_S = 400.0  # of an engine, on a crowded machine
WIDTH = 4  # requests under way
CONTEXT = 512
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
HERE = os.pathsep.join(
    filter(None, [os.path.dirname(__file__), ROOT, os.environ.get("PYTHONPATH")])
)
ENGINES = ("engine_0", "engine_1")


def actor(cls: type, **environment: str) -> Any:
    variables = {"PYTHONPATH": HERE, "OMP_NUM_THREADS": "1", **environment}
    return ray.remote(cls).options(
        max_concurrency=1000, num_cpus=0.01, runtime_env={"env_vars": variables}
    )


class Buffer:
    """What the synchronizer tells of published versions."""

    async def published(self, version: int, run_epoch: int) -> None:
        pass


class World:
    """`way`: as in `mortal.MortalWorker`."""

    def __init__(self, path: Path, directory: Path, way: str, names: tuple[str, ...] = ENGINES):
        self.path, self.directory, self.names, self.way = path, directory, names, way
        self.judge = Judge(path, directory / "clean")
        self.seen: Counter[str] = Counter()
        self.version = 0
        self.buffer = actor(Buffer).remote()
        self.engines: dict[str, Any] = {}
        self.ends: dict[str, Any] = {}  # of actors, as the supervisor would hear of them
        self._clients = 0
        started = [self.spawn(name) for name in names]
        ray.get(started, timeout=START_S)
        self.new_synchronizer()
        self.ranks = TrainerRanks(path, 1, SYNC_S, way)
        self.connect()
        self.new_client()
        self.round()
        self.get(self.client.go.remote())

    def get(self, reference: Any, timeout: float = ANSWER_S) -> Any:
        return ray.get(reference, timeout=timeout)

    # --- a run's normal life ----------------------------------------------------------------------

    def connect(self) -> None:
        asked = self.synchronizer.connect.remote(
            self.ranks.plan, self.ranks.streams, self.ranks.epoch
        )
        self.get(asked)

    def begin(self) -> Any:
        """Open the next version everywhere and ask for its round; raises RankDied when a rank does
        not live to open it.

        Like rank 0, which does not know of the other one, the test then has asked for the round
        already.
        """
        self.ranks.ask("close")
        self.version += 1
        return self.open()

    def open(self) -> Any:
        self.ranks.tell("open", self.version)
        asked = self.publish()
        self.ranks.hear()
        return asked

    def publish(self) -> Any:
        self.asked = self.synchronizer.publish.remote(self.version, self.ranks.epoch)
        return self.asked

    def round(self) -> None:
        """The next version reaches everybody who is here."""
        numbers = self.get(self.begin())
        assert numbers["engines"] == len(self.names), numbers

    # --- parts that are new -----------------------------------------------------------------------

    def spawn(self, name: str) -> Any:
        """A new engine's actor; returns what tells that it has started."""
        log = str(self.directory / f"{name}.log")
        model, rollout = (
            ModelConfig(model_path=str(self.path)),
            RolloutModelConfig(
                dtype="fp32", kv_cache_gb=0.125, enforce_eager=True, max_num_seqs=256
            ),
        )
        self.engines[name] = actor(MortalEngine, RFT_LOG_FILE=log, RFT_FAULT_WAY=self.way).remote(
            name, model, rollout, 1, 0, "cpu", CONTEXT
        )
        self.ends[name] = self.engines[name].watch.remote()
        return self.engines[name].start.remote()

    def new_engine(self, name: str) -> None:
        """As rft.run.fleet does when one has died and the synchronizer knows."""
        ray.kill(self.engines[name])
        end_marked("RFT_LOG_FILE", str(self.directory / f"{name}.log"))
        self.get(self.spawn(name), START_S)
        self.get(self.synchronizer.join.remote(name, ActorHandle(self.engines[name])))

    def new_synchronizer(self) -> None:
        self.synchronizer = actor(MortalSynchronizer).remote(ActorHandle(self.buffer), SYNC_S)
        self.ends["synchronizer"] = self.synchronizer.watch.remote()
        for name, engine in self.engines.items():
            self.get(self.synchronizer.join.remote(name, ActorHandle(engine)))

    def new_ranks(self) -> None:
        """Of the next epoch: when one dies, the launcher ends the others."""
        self.ranks.end()
        self.ranks = TrainerRanks(self.path, self.ranks.epoch + 1, SYNC_S, self.way)
        self.connect()

    def new_client(self) -> None:
        self._clients += 1
        self.file = self.directory / f"client_{self._clients}"
        self.client = actor(Client).remote(f"client_{self._clients}", str(self.file), WIDTH)
        self.ends["client"] = self.client.watch.remote()
        self.get(self.client.follow.remote(self.synchronizer))

    def await_everybody(self) -> None:
        """Until all engines are admitted."""
        generation, members = -1, {}
        while set(members) != set(self.names):
            generation, members = self.get(self.synchronizer.members.remote(generation))

    # --- deaths -----------------------------------------------------------------------------------

    def pid(self, part: str) -> int:
        """Of "client", "synchronizer", or of engine_1's "actor" or "core"."""
        if part in ("actor", "core"):
            return int(self.get(self.engines["engine_1"].pids.remote())[part == "core"])
        return int(self.get(getattr(self, part).pid.remote()))

    def outcome(self, asked: Any) -> str:
        """What became of a round: "" or the error."""
        try:
            self.get(asked, SYNC_S + ANSWER_S)
        except ray.exceptions.RayError as error:
            return str(getattr(error, "cause", None) or error)
        return ""

    def await_end(self, part: str) -> None:
        ready, _ = ray.wait([self.ends[part]], timeout=ANSWER_S)
        assert ready, f"{part} lives on"

    def prove(self) -> None:
        """After a fault, everybody being there again: a clean
        round; then whatever was said is judged.
        """
        self.await_everybody()
        self.round()
        self.get(self.client.hold.remote())
        self.judge.compare_with_clean(list(self.engines.values()), self.version)
        self.hear_client()
        self.get(self.client.go.remote())

    def hear_client(self) -> None:
        self.seen += self.judge.traffic(self.file)

    def end(self) -> None:
        self.ranks.end()
        self.get([engine.shutdown.remote() for engine in self.engines.values()])
        for handle in (*self.engines.values(), self.synchronizer, self.client, self.buffer):
            ray.kill(handle)
