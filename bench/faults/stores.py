"""Checkpoints in an object store behind a network that misbehaves: real agents, a real server,
cuts, delays, repeated requests, refusals, listings that lag, and kill -9 at requests.

    case(seed) ─► faults and kills ─► a load under faults ─► a start: sweep, load ─► the next save

Judged are the objects as they lie in the store, read past the network: everything with a manifest
must be sound, what was acknowledged must be there, what is loaded must be the newest, and after the
sweep nothing may be there that no manifest vouches for.
"""

import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.faults.disks import Board
from bench.faults.job import Job, Outcome, save_here
from bench.faults.judge import Tally, committed, compared
from bench.faults.loader import Loader
from bench.faults.proxy import CALM, KINDS, Network, Plan
from bench.faults.toy import Cut
from rft.checkpoint import fence
from rft.checkpoint.catalog import Hint
from rft.checkpoint.objects import OURS, SWEPT, ObjectStorage
from rft.checkpoint.records import (
    LATEST,
    MANIFEST,
    QUARANTINED,
    decode_json,
    encode_json,
    final_name,
)
from rft.checkpoint.storage import Disk, Storage

BUCKET, JOB = "faults", "run"
URL = f"s3://{BUCKET}/{JOB}"
OLD, NEW, AFTER = Cut(1), Cut(2), Cut(3)
CUTS = ("kill", "lost request", "lost answer", "half answer")
NEXT = 4  # of so many cases in one another attempt saves too
PART = 2**12  # bytes of a part: the toy's files have several
LOOK_S = 0.15
REQUESTS = 40  # per rank of a job that nothing disturbs, about
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_MAX_ATTEMPTS": "2",
}


@dataclass
class StoreJob(Job):
    """A job whose checkpoints go up; only `control` is in `root`."""

    def storage(self, rank: int) -> Storage:
        found = ObjectStorage(URL, part=PART)
        found.look_s = LOOK_S
        return found

    def names(self) -> Storage:
        return self.storage(0)


@dataclass(frozen=True)
class Case:
    """Everything that a seed draws. `victims`: who is killed."""

    seed: int
    world: int
    windows: int
    keep: int
    weights: bool
    rate: float
    lags: bool
    victims: tuple[str, ...]
    at: float  # share of REQUESTS
    after: bool
    kinds: tuple[str, ...]

    @classmethod
    def drawn(cls, seed: int) -> "Case":
        draw = random.Random(seed)
        world = draw.choice((1, 2))
        agents = [f"agent{rank}" for rank in range(world)]
        killed = draw.choice(("", "one", "agents", "trainer", "all"))
        victims = {
            "": (),
            "one": (draw.choice(agents),),
            "agents": tuple(agents),
            "trainer": ("trainer",),
            "all": (*agents, "trainer"),
        }[killed]
        kinds = tuple(kind for kind in KINDS if draw.random() < 0.7) or KINDS
        return cls(
            seed,
            world,
            windows=draw.choice((1, 2)),
            keep=draw.choice((0, 1)),
            weights=draw.random() < 0.25,
            rate=draw.choice((0.0, 0.1, 0.25)) if killed else draw.choice((0.1, 0.25)),
            lags=draw.random() < 0.3,
            victims=victims,
            at=draw.random(),
            after=draw.random() < 0.5,
            kinds=kinds,
        )

    @property
    def kind(self) -> str:
        names = ["kill"] * bool(self.victims) + ["cuts"] * bool(self.rate) + ["lag"] * self.lags
        return " and ".join(names)

    def plan(self, pids: dict[str, int]) -> Plan:
        return Plan(
            self.seed,
            self.rate,
            self.kinds,
            self.lags,
            number=1 + int(self.at * REQUESTS * self.world) if self.victims else 0,
            after=self.after,
            kill=tuple(pids[name] for name in self.victims),
        )


class Store:
    """The server as it is, past the network."""

    def __init__(self, address: str):
        import boto3

        self._client: Any = boto3.client("s3", endpoint_url=address)
        self._client.create_bucket(Bucket=BUCKET)

    def names(self) -> list[str]:
        """Of the job, below it."""
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
        found = [one["Key"] for page in pages for one in page.get("Contents", [])]
        return [key.removeprefix(f"{JOB}/") for key in found]

    def get(self, key: str) -> bytes:
        return bytes(self._client.get_object(Bucket=BUCKET, Key=f"{JOB}/{key}")["Body"].read())

    def put(self, key: str, data: bytes) -> None:
        self._client.put_object(Bucket=BUCKET, Key=f"{JOB}/{key}", Body=data)

    def uploads(self) -> list[tuple[str, str]]:
        """(key, id) of those that are not complete."""
        found = self._client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
        return [(one["Key"], one["UploadId"]) for one in found]

    def clear(self) -> None:
        for key in self.names():
            self._client.delete_object(Bucket=BUCKET, Key=f"{JOB}/{key}")
        for key, upload in self.uploads():
            self._client.abort_multipart_upload(Bucket=BUCKET, Key=key, UploadId=upload)

    def content(self) -> dict[str, bytes]:
        return {key: self.get(key) for key in self.names()}


class StoreGround:
    """One server, its network, a loader, and what a store holds before a case: step 1."""

    def __init__(self, upstream: str = ""):
        self.network = Network(upstream)
        os.environ.update(
            {name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()},
            AWS_ENDPOINT_URL=self.network.address,
        )
        self.store = Store(self.network.store)
        self.loader = Loader()
        self.top = Path(tempfile.mkdtemp(prefix="rft-stores-"))
        self._old: dict[int, dict[str, bytes]] = {}

    def fresh(self, world: int) -> Path:
        """A store with the checkpoint of step 1, and an empty directory beside it."""
        if world not in self._old:
            self._old[world] = _as_objects(self._empty(), world)
        self.store.clear()
        for key, data in self._old[world].items():
            self.store.put(key, data)
        root = self._empty()
        fence.take_epoch(root / "control")
        return root

    def _empty(self) -> Path:
        shutil.rmtree(self.top / "case", ignore_errors=True)
        (self.top / "case").mkdir()
        return self.top / "case"

    def job(
        self,
        root: Path,
        world: int,
        cut: Cut,
        windows: int = 1,
        keep: int = 0,
        weights: bool = False,
        watch: Callable[[Job], None] = lambda job: None,
    ) -> Job:
        disks = [Disk() for _ in range(world)]
        return StoreJob(
            root, world, [cut], disks, Board(), windows, keep, weights, lease_s=0.3, watch=watch
        )

    def mirror(self) -> Path:
        """What every reader may see, as files."""
        root = self.top / "mirror"
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        content = self.store.content()
        hidden = {
            key.rpartition("/")[0]
            for key in content
            if key.rpartition("/")[2] in (QUARANTINED, SWEPT)
        }
        for key, data in content.items():
            if key.rpartition("/")[0] not in hidden:
                (root / key).parent.mkdir(parents=True, exist_ok=True)
                (root / key).write_bytes(data)
        return root

    def orphans(self) -> list[str]:
        """What no manifest vouches for and nobody has set aside: of our names, and uploads."""
        keys = self.store.names()
        marked = {
            key.rpartition("/")[0]
            for key in keys
            if key.rpartition("/")[2] in (MANIFEST, QUARANTINED)
        }
        return [
            *(key for key in keys if _is_of_a_save(key) and key.rpartition("/")[0] not in marked),
            *(key for key in keys if key.rpartition("/")[2].startswith(".") or key.endswith(SWEPT)),
            *(f"upload of {key}" for key, _ in self.store.uploads()),
        ]

    def close(self) -> None:
        self.loader.close()
        self.network.close()
        shutil.rmtree(self.top)

    def __enter__(self) -> "StoreGround":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _as_objects(root: Path, world: int) -> dict[str, bytes]:
    """A save that was made on a disk, under the names that it has in a store."""
    save_here(root, OLD, world, epoch=1)
    name = final_name("step", OLD.step)
    place = f"{name}.e0001n0000"
    content = {f"{place}/{path.name}": path.read_bytes() for path in (root / name).iterdir()}
    hint = decode_json((root / LATEST).read_bytes(), Hint)
    return content | {LATEST: encode_json(Hint(name=place, epoch=hint.epoch, step=hint.step))}


def _is_of_a_save(key: str) -> bool:
    return bool(OURS.fullmatch(key.rpartition("/")[0].rpartition("/")[2]))


def strike(ground: StoreGround, case: Case) -> tuple[list[str], dict[str, int]]:
    """Problems of one case, and what it met."""
    root = ground.fresh(case.world)
    ground.network.plan(Plan(hold=True))

    def release(job: Job) -> None:
        ground.network.plan(case.plan(job.pids))

    outcome = ground.job(
        root, case.world, NEW, case.windows, case.keep, case.weights, watch=release
    ).run()
    met = dict(ground.network.plan(CALM)["met"])
    problems: list[str] = []
    if case.rate or case.lags:
        problems += under_faults(ground, case, outcome, met)
    problems += aftermath(ground, case, outcome)
    if case.seed % NEXT == 0:
        problems += the_next_one_works(ground, case, root)
    return problems, met


def under_faults(
    ground: StoreGround, case: Case, outcome: Outcome, met: dict[str, int]
) -> Iterator[str]:
    """A start while the network is as bad as before: it may be refused, and may not be wrong."""
    plan = Plan(case.seed + 1, case.rate, case.kinds, case.lags)
    ground.network.plan(plan)
    loaded = ground.loader.load(URL, sweep=True, patience_s=1.0)
    for kind, count in ground.network.plan(CALM)["met"].items():
        met[kind] = met.get(kind, 0) + count
    least = max([OLD.step, *outcome.acknowledged])
    if loaded.cut is not None and not loaded.exact:
        yield f"WRONG under faults the loader accepted {loaded.cut} with other bytes"
    elif loaded.cut is not None and loaded.cut.step < least:
        yield f"LOST under faults the loader took {loaded.cut}, {least} was acknowledged"
    elif loaded.cut is None and not loaded.error:
        yield "LOST under faults the loader found nothing and said nothing"


def aftermath(ground: StoreGround, case: Case, outcome: Outcome) -> Iterator[str]:
    """A calm start; of a trainer that died alone what was staged must have landed, if only the
    network had let it.
    """
    must_land = case.victims == ("trainer",) and not case.rate and not case.lags
    least = max([OLD.step, *outcome.acknowledged, *(outcome.staged if must_land else [])])
    loaded = ground.loader.load(URL, sweep=True)
    root = ground.mirror()
    yield from compared(root, committed(root), loaded, least)
    if orphans := ground.orphans():
        yield f"left after the sweep: {orphans}"
    if any(key.endswith(QUARANTINED) for key in ground.store.names()):
        yield "a checkpoint was set aside"
    if outcome.hung:
        yield "somebody did not end"


def the_next_one_works(ground: StoreGround, case: Case, root: Path) -> Iterator[str]:
    done = ground.job(root, case.world, AFTER).run()
    if set(done.acknowledged) != {AFTER.step}:
        yield f"the next attempt's save: {done}"
    loaded = ground.loader.load(URL)
    if loaded.cut != AFTER or not loaded.exact:
        yield f"LOST the next attempt's save: {loaded}"


def run(ground: StoreGround, count: int, seed: int) -> tuple[Tally, dict[str, int]]:
    """Cases one after the other, until `count` kills and cuts were met: (of the cases, all faults
    by kind).
    """
    tally, met, number = Tally("object store"), dict[str, int](), 0
    while sum(met.get(kind, 0) for kind in CUTS) < count:
        case = Case.drawn(seed + number)
        problems, found = strike(ground, case)
        tally.note(case.kind, str(case), problems)
        met = {kind: met.get(kind, 0) + found.get(kind, 0) for kind in met | found}
        number += 1
    return tally, met
