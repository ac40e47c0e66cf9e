"""What a user's job scripts promise: they parse, decide nothing about learning, name no place, and
say what is missing.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from rft.config import ConfigError, grace_of, known_keys
from rft.preflight.fill import ray_of

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
SCRIPTS = sorted(LAUNCH.glob("*.sh"))
MANIFESTS = sorted((LAUNCH / "kubernetes").glob("*.yaml"))
PLACES = {  # where a run is, and what it gets: all that a template may decide
    "cluster.ray_address",
    "trainer.num_ranks",
    "shutdown_grace_s",
    "checkpoint_root_dir",
    "name",
    "experiment",
}
KEY = re.compile(r"(?<![\w$./-])([a-z_]+(?:\.[a-z_]+)*)=")


def code(path: Path) -> str:
    """Without comments."""
    return "\n".join(
        line
        for line in path.read_text(encoding="utf-8").splitlines()
        if not line.lstrip().startswith("#")
    )


def names(path: Path) -> str:
    return path.name


@pytest.mark.parametrize("script", SCRIPTS, ids=names)
def test_script_parses(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    assert os.access(script, os.X_OK) and len(script.read_text(encoding="utf-8").splitlines()) < 100
    assert "set -euo pipefail" in code(script)


@pytest.mark.parametrize("manifest", MANIFESTS, ids=names)
def test_manifest_loads(manifest: Path) -> None:
    for part in yaml.safe_load_all(manifest.read_text(encoding="utf-8")):
        assert part["kind"] and part["apiVersion"] and part["metadata"]["name"].startswith("rft-")


@pytest.mark.parametrize("template", [*SCRIPTS, *MANIFESTS], ids=names)
def test_template_sets_no_hyper_parameter(template: Path) -> None:
    known = {*known_keys(), "experiment"}
    assert {key for key in KEY.findall(code(template)) if key in known} <= PLACES
    assert not re.search(r"(?<![\w/])(?:/home|/work|/root|\.\./|configs/)", code(template))


def run(
    script: str, directory: Path, *arguments: str, **environment: str
) -> "subprocess.CompletedProcess[str]":
    known = {"PATH": os.environ["PATH"]} | environment
    return subprocess.run(
        [LAUNCH / script, *arguments],
        cwd=directory,
        env=known,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("script", "environment", "missing"),
    [
        ("torchrun.sh", {}, "RANKS"),
        ("torchrun.sh", {"RANKS": "2", "NNODES": "2"}, "NODE_RANK"),
        ("ray.sh", {}, "HEAD"),
        ("ray.sh", {"HEAD": "h", "NODES": "2"}, "RAY_AUTH_TOKEN"),
        ("ray_job.sh", {}, "RAY_API"),
        ("ray_job.sh", {"RAY_API": "http://h:1"}, "RANKS"),
    ],
)
def test_what_is_missing_is_named(
    tmp_path: Path, script: str, environment: dict[str, str], missing: str
) -> None:
    done = run(script, tmp_path, **environment)
    assert done.returncode != 0 and f"set {missing} to" in done.stderr


def recorder(directory: Path) -> str:
    """An interpreter that only says what it was started with, one word a line."""
    path = directory / "recorder"
    path.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n', encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def test_torchrun_from_any_directory_passes_words_as_they_are(tmp_path: Path) -> None:
    done = run(
        "torchrun.sh",
        tmp_path,
        "name=a b",
        "model.lora_configs=[{lora_rank: 4}]",
        RANKS="4",
        PYTHON=recorder(tmp_path),
    )
    words = done.stdout.splitlines()
    assert words[:2] == ["-m", "rft.run.loopback"]
    assert words[-5:] == [
        "-m",
        "rft.train",
        "trainer.num_ranks=4",
        "name=a b",
        "model.lora_configs=[{lora_rank: 4}]",
    ]


def test_ranks_of_all_nodes_are_counted(tmp_path: Path) -> None:
    environment = {
        "RANKS": "4",
        "NNODES": "3",
        "NODE_RANK": "2",
        "MASTER_ADDR": "h",
        "PYTHON": recorder(tmp_path),
    }
    words = run("torchrun.sh", tmp_path, **environment).stdout.splitlines()
    assert "trainer.num_ranks=12" in words and {
        "--nnodes=3",
        "--node-rank=2",
        "--master-addr=h",
    } <= set(words)


def test_the_cluster_of_a_submitted_job() -> None:
    assert ray_of({"RAY_ADDRESS": "10.0.0.1:6379"}) == "10.0.0.1:6379"
    with pytest.raises(ConfigError, match="cluster.ray_address=auto"):
        ray_of({})


@pytest.mark.parametrize(("environment", "seconds"), [({}, 20.0), ({"SLURM_JOB_ID": "7"}, 120.0)])
def test_slurm_gives_more_time_to_save(environment: dict[str, str], seconds: float) -> None:
    assert grace_of(environment) == seconds
