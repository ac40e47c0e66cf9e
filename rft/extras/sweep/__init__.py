"""Hydra multirun sweeps: trials that run as processes of their own and go on where they stood.

Here is what no sweep can do, said before Hydra begins one. In: the command line. Out: nothing, or a
`ConfigError`. `rft.train` asks; no trial has started.
"""

import importlib.util

from rft.config import ConfigError
from rft.ground import redact

LAUNCHERS = {  # launchers of other packages, and the package
    **dict.fromkeys(("joblib", "parallel"), "hydra_joblib_launcher"),
    **dict.fromkeys(
        ("submitit_slurm", "submitit_local", "slurm", "slurm_here"), "hydra_submitit_launcher"
    ),
}


def is_multirun(arguments: list[str]) -> bool:
    return bool({"-m", "--multirun", "hydra.mode=MULTIRUN"} & set(arguments))


def check_arguments(arguments: list[str], launcher: str | None) -> None:
    """`launcher`: what started this process as one rank of many, if anything did."""
    if launcher:
        raise ConfigError(
            f"-m cannot run under {launcher}, where every rank would start the whole sweep: start "
            "`python -m rft.train -m ...` "
            "once, without it; each trial starts its own ranks (trainer.num_ranks)"
        )
    for argument in arguments:
        key, _, value = argument.lstrip("+").partition("=")
        plugin = LAUNCHERS.get(value) if key == "hydra/launcher" else None
        if plugin and importlib.util.find_spec(f"hydra_plugins.{plugin}") is None:
            raise ConfigError(
                f"{argument} needs {plugin.replace('_', '-')}: pip install 'rft[sweep]'"
            )
        is_named = "${oc.env:" in value
        secret = redact.is_secret_key(key.rsplit(".", 1)[-1]) or redact.text(argument) != argument
        if secret and not is_named:
            raise ConfigError(
                f"{key}: a sweep writes its overrides down, and other users of this machine see "
                f"its command line: put this secret into the environment (WANDB_API_KEY), or give "
                f"{key}='${{oc.env:NAME}}'"
            )
        if key in ("name", "project", "checkpoint_root_dir") and "," in argument:
            raise ConfigError(
                f"{key} is where the whole sweep is kept and cannot be swept: every trial gets a "
                "name of its own"
            )
