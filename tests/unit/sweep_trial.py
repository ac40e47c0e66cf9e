"""A run that takes no time, for tests of sweeps: `prepare` leaves what a finished stage leaves, so
nothing is started.

Every attempt adds a line to `<checkpoint_root_dir>/attempts`. Seed 13 fails; a seed whose pipe
`<checkpoint_root_dir>/hold_<seed>` exists waits there, for a test to kill it.
"""

import json
from pathlib import Path

from rft import config as configs
from rft.config import Config, ConfigError

DONE = {"version": 2, "complete": True, "asked": 10**6, "huggingface": ""}


def prepare(config: Config) -> None:
    root, job = Path(config.checkpoint_root_dir), configs.job_dir(config)
    with (root / "attempts").open("a") as file:
        file.write(f"{config.seed} {config.trainer.grad_clip:g}\n")
    if (hold := root / f"hold_{config.seed}").exists():
        hold.read_text()
    if config.seed == 13:
        raise ConfigError("seed=13: brings bad luck")
    values = [0.5, 0.25 * config.seed - config.trainer.grad_clip]
    rows = [
        {"step": step, "time_s": 0.0, "loss": value} for step, value in enumerate(values, start=1)
    ]
    (job / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (job / "result.json").write_text(json.dumps(DONE))
