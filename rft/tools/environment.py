"""`rft environment`: whether an environment can be used here, and rows of tasks that it makes.

In: what `workflow_args` of the workflow `environment` say. Out: one line, or a file of rows for a
taskset; exit code 2 with what is wrong. The environment runs in its own Python, once.
"""

import argparse
import json
import sys
from pathlib import Path

from rft.ground.errors import ConfigError
from rft.rollout.environments import EnvironmentFailed, EnvironmentSettings, asked_once, problems


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    try:
        settings = EnvironmentSettings.of(
            {
                "environment": options.environment,
                "env_id": options.env_id,
                "env_args": json.loads(options.env_args),
                "python": options.python,
            },
            "environment",
        )
        if said := list(problems(settings, "environment", True)):
            raise ConfigError(*said)
        if options.do == "check":
            print(f"{options.environment}: it can be used, by {settings.interpreter}")
            return 0
        rows = asked_once(settings, "--rows", count=options.count, seed=options.seed)
    except (ConfigError, EnvironmentFailed, ValueError) as error:
        print(f"rft environment: {error}", file=sys.stderr)
        return 2
    options.output.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{len(rows)} rows in {options.output}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rft environment", description="Environments of docs/environments.md, tried by hand."
    )
    actions = parser.add_subparsers(dest="do", required=True)
    check = actions.add_parser("check", help="import it once, in its own Python")
    rows = actions.add_parser("rows", help="write rows of tasks for a taskset")
    for one in (check, rows):
        one.add_argument("environment", help="gymnasium, ..., or path/to/file.py:Class")
        one.add_argument("env_id", nargs="?", default="", help="what of it: FrozenLake-v1")
        one.add_argument("--env-args", metavar="JSON", default="{}", help="arguments of its class")
        one.add_argument("--python", default="", help="its virtual environment")
    rows.add_argument("-o", "--output", metavar="FILE.jsonl", type=Path, required=True)
    rows.add_argument("--count", type=int, default=1000)
    rows.add_argument("--seed", type=int, default=0)
    return parser
