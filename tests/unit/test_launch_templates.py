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
    (handled,) = [word for word in words if word.startswith("--signals-to-handle=")]
    assert {"SIGTERM", "SIGINT", "SIGUSR1"} <= set(handled.partition("=")[2].split(","))
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


def test_nodes_that_come_and_go_count_their_ranks_themselves(tmp_path: Path) -> None:
    """`trainer.layouts` say what so many ranks are."""
    environment = {"RANKS": "4", "NNODES": "1:3", "MASTER_ADDR": "h"}
    done = run("torchrun.sh", tmp_path, "name=x", PYTHON=recorder(tmp_path), **environment)
    words = done.stdout.splitlines()
    assert {"--nnodes=1:3", "--rdzv-endpoint=h:29500", "--nproc-per-node=4"} <= set(words)
    assert words[-3:] == ["-m", "rft.train", "name=x"]


def test_the_cluster_of_a_submitted_job() -> None:
    assert ray_of({"RAY_ADDRESS": "10.0.0.1:6379"}) == "10.0.0.1:6379"
    with pytest.raises(ConfigError, match="cluster.ray_address=auto"):
        ray_of({})


@pytest.mark.parametrize(("environment", "seconds"), [({}, 20.0), ({"SLURM_JOB_ID": "7"}, 120.0)])
def test_slurm_gives_more_time_to_save(environment: dict[str, str], seconds: float) -> None:
    assert grace_of(environment) == seconds


def stub(directory: Path, name: str, text: str) -> None:
    path = directory / name
    path.write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
    path.chmod(0o755)


SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_NNODES": "3",
    "SLURM_CPUS_ON_NODE": "8",
    "TRAINER_NODES": "2",
    "RANKS_PER_NODE": "4",
    "NCCL_IB_HCA": "mlx5",
}


def steps(directory: Path, **environment: str) -> list[str]:
    """Every srun of launch/slurm.sh, as one line of words."""
    record, begun = directory / "steps", directory / "begun"
    os.mkfifo(begun)
    # the job ends with its last step, and takes the three beside it with it
    stub(
        directory,
        "srun",
        f'echo "$NCCL_IB_HCA $*" >>{record}\n'
        f'if [[ "$*" != *rft.train* ]]; then echo >{begun}; exit; fi\n'
        f"exec 3<>{begun}; for _ in 1 2 3; do read -r -u 3 _; done",
    )
    stub(directory, "timeout", "")
    stub(
        directory,
        "scontrol",
        'if [[ $2 == hostnames ]]; then printf "n%d\\n" 1 2 3; '
        'else echo "NodeName=n1 NodeAddr=10.0.0.1 Port=1"; fi',
    )
    path = f"{directory}:{os.environ['PATH']}"
    done = run("slurm.sh", directory, "name=x", PATH=path, **SLURM, **environment)
    assert done.returncode == 0, done.stderr
    return record.read_text(encoding="utf-8").splitlines()


def test_every_step_of_slurm_has_the_environment_and_the_container(tmp_path: Path) -> None:
    plain = steps(tmp_path)
    assert len(plain) == 4 and not [one for one in plain if "container" in one]
    ranks = next(one for one in plain if "-m rft.train" in one)
    assert "--ntasks=8 --ntasks-per-node=4 --nodelist=n1,n2 env MASTER_ADDR=10.0.0.1" in ranks
    (tmp_path / "steps").unlink()
    (tmp_path / "begun").unlink()
    inside = steps(tmp_path, CONTAINER_IMAGE="rft.sqsh", CONTAINER_MOUNTS="/data:/data")
    assert len(inside) == 4
    for one in (*plain, *inside):
        assert one.startswith("mlx5 --export=ALL")
    for one in inside:
        assert "--container-image=rft.sqsh" in one and ",NCCL_IB_HCA" in one
        assert f"--container-mounts=/tmp:/tmp,{tmp_path}:{tmp_path},/data:/data" in one


def hosts(directory: Path) -> None:
    """`ssh` to h0..h3 with an environment of its own; Ray and Python write down what they do."""
    stub(directory, "ssh", 'exec env -i PATH="$PATH" HOST="${1#h}" "${@:2}"')
    stub(directory, "hostname", 'echo "10.0.0.$HOST"')
    says = f'echo "$NCCL_IB_HCA ${{RAY_AUTH_TOKEN:+token}} $*" >>{directory}/$NAME$HOST'
    # as Ray does it: the head runs the command, the others stay until the head has gone
    stub(
        directory,
        "ray",
        f"NAME=ray; {says}\nwhile [[ $1 != -- ]]; do shift; done\n"
        f'case $HOST in 0) shift; exec "$@";; 1) cat {directory}/ended;; esac',
    )
    os.mkfifo(directory / "ended")
    stub(directory, "python", f"NAME=python; {says}\n[[ $HOST != 1 ]] || echo >{directory}/ended")


def test_one_command_is_a_trainer_of_two_machines(tmp_path: Path) -> None:
    hosts(tmp_path)
    settings = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "HOSTS": "h0 h1 h2 h3",
        "TRAINERS": "2",
        "RANKS": "4",
        "NCCL_IB_HCA": "mlx5",
    }
    done = run("ray.sh", tmp_path, "name=a b", "mode=both", **settings)
    assert done.returncode == 0, done.stderr
    said = {path.name: path.read_text() for path in tmp_path.glob("*[0-3]")}
    assert {*said} == {"ray0", "ray1", "ray2", "ray3", "python0", "python1"}
    assert all(text.startswith("mlx5 token ") for text in said.values())
    for number in range(4):
        text = said[f"ray{number}"]
        assert "--address 10.0.0.0:6379 --min-nodes 4" in text
        assert ("--num-gpus=0" in text) == (number < 2), "engines get no GPU of a rank's"
    for number in range(2):
        text = said[f"python{number}"]
        assert f"--nnodes=2 --node-rank={number} --master-addr=10.0.0.0" in text
        assert "trainer.num_ranks=8 cluster.ray_address=10.0.0.0:6379 name=a b mode=both" in text


def test_a_run_in_a_container_of_every_machine(tmp_path: Path) -> None:
    stub(tmp_path, "docker", 'printf "%s\\n" "$@"')
    settings = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "HEAD": "10.0.0.1",
        "NODES": "2",
        "RAY_AUTH_TOKEN": "secret",
        "NCCL_IB_HCA": "mlx5",
        "CONTAINER_IMAGE": "rft:latest",
        "CONTAINER_MOUNTS": "/data:/data,/models:/models",
    }
    words = run("ray.sh", tmp_path, "name=x", **settings).stdout.splitlines()
    assert words[-4:] == ["rft:latest", "bash", str(LAUNCH / "ray.sh"), "name=x"]
    for word in ("IPC_LOCK", "--volume=/models:/models", "--env=NCCL_IB_HCA", "--env=HEAD"):
        assert word in words
    assert not [word for word in words if "secret" in word or "CONTAINER_IMAGE" in word]
