"""Injected faults against checkpoints in an object store: kill -9, cuts, delays, repeated and
refused requests, listings that lag.

    python -m bench.store_faults [--quick] [--count N] [--seed N] [--endpoint URL]

The store is moto's server on loopback, or the one at --endpoint (its credentials from the
environment; the bucket `faults` is made there, and emptied). Out: a table and one last JSON line.
`meets`: 0 bad loads, 0 losses of what was acknowledged, 0 orphans after the sweep.
"""

import argparse
import secrets
import signal
import sys
import time

from bench import report
from bench.faults import stores

COUNTS = {True: 4, False: 1000}  # kills and cuts; a case meets several, and other faults
SHOWN = 12


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Inject faults between agents and a store.")
    parser.add_argument("--quick", action="store_true", help=f"{COUNTS[True]} kills and cuts")
    parser.add_argument("--count", type=int, help="kills and cuts")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**9), help="of the first")
    parser.add_argument("--endpoint", default="", help="of another server than moto's")
    asked = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # or its directory would stay
    before = time.monotonic()
    with stores.StoreGround(asked.endpoint) as ground:
        tally, met = stores.run(ground, asked.count or COUNTS[asked.quick], asked.seed)
    cuts = sum(met.get(kind, 0) for kind in stores.CUTS)
    report.table("faults", ("met", "count"), [(kind, str(met[kind])) for kind in sorted(met)])
    rows = [(kind, str(count)) for kind, count in sorted(tally.kinds.items())]
    rows += [("all", str(tally.injected)), ("accepted wrong", str(tally.wrong))]
    rows += [("good one lost", str(tally.lost)), ("other failures", str(tally.other))]
    rows += [("seconds", f"{time.monotonic() - before:.1f}")]
    report.table(tally.name, ("cases", "count"), rows)
    for problem in tally.problems[:SHOWN]:
        print(f"  {problem[:900]}", flush=True)
    counts: dict[str, object] = {
        "injected": sum(met.values()),
        "kills_and_cuts": cuts,
        "by_kind": met,
        "cases": tally.injected,
        "accepted_wrong": tally.wrong,
        "lost": tally.lost,
        "other": tally.other,
    }
    config = {
        "count": asked.count or COUNTS[asked.quick],
        "seed": asked.seed,
        "endpoint": asked.endpoint,
    }
    versions = report.versions("moto", "s3fs", "xxhash")
    report.last_line("store_faults", {}, counts, config, versions, not tally.bad)


if __name__ == "__main__":
    main()
