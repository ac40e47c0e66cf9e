"""What `make release` has built, in empty directories: the sdist is the wheel's sources, both are
of what is here, and on Python 3.12, without any of its dependencies, the command answers.

That the quickstart runs from the same wheel, on 3.11, is in test_installed.py, which `make release`
runs too. Alone, these tests have `make dist` build first; what is not committed is in no release.
"""

import hashlib
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from rft import __version__

ROOT = Path(__file__).resolve().parents[2]
DIST = Path(os.environ.get("RFT_DIST", ROOT / "dist"))  # `make release` has built it
OTHER = ROOT / ".venv-release" / "bin" / "python"  # 3.12, with what `rft config` wants and no torch

# of the text that the foundation publishes, unchanged
APACHE = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
NOTES = ("direct_url.json", "RECORD", "WHEEL")

pytestmark = pytest.mark.verify


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    if "RFT_DIST" not in os.environ:
        done = subprocess.run(["make", "-C", ROOT, "dist"], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def released(ending: str) -> Path:
    (found,) = DIST.glob(f"rft-*{ending}")
    return found


def installed(python: Path, file: Path, target: Path) -> Path:
    """What pip puts into an empty directory, nothing of it from anywhere else."""
    command = [python, "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
    more = ["--no-build-isolation", "--target", target, file]
    subprocess.run([*command, *more], check=True, cwd=target.parent)
    return target


def rft(
    target: Path, *words: str, flags: tuple[str, ...] = ()
) -> "subprocess.CompletedProcess[str]":
    """The command as it is installed there, by Python 3.12, in an empty directory."""
    (target.parent / "empty").mkdir(exist_ok=True)
    return subprocess.run(
        [OTHER, *flags, target / "bin" / "rft", *words],
        cwd=target.parent / "empty",
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(target), "HOME": str(target.parent)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_both_are_of_this_version() -> None:
    assert released(".whl").name == f"rft-{__version__}-py3-none-any.whl"
    assert released(".tar.gz").name == f"rft-{__version__}.tar.gz"


def test_the_sdist_installs_as_the_wheel_does(tmp_path: Path) -> None:
    one = installed(Path(sys.executable), released(".whl"), tmp_path / "wheel")
    other = installed(Path(sys.executable), released(".tar.gz"), tmp_path / "sdist")
    assert content(one) == content(other)
    assert {"rft/cli.py", "rft/configs/train.yaml", "rft/launch/slurm.sh"} <= {*content(one)}


def content(target: Path) -> dict[str, str]:
    """Hash of every file but notes of who built and installed it."""
    return {
        str(path.relative_to(target)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(target.rglob("*"))
        if path.is_file() and path.suffix != ".pyc" and path.name not in NOTES
    }


def sdist() -> dict[str, bytes | None]:
    """What it holds, by name; None for a directory."""
    with tarfile.open(released(".tar.gz")) as archive:
        members = [(one, archive.extractfile(one)) for one in archive.getmembers()]
        return {one.name.partition("/")[2]: file and file.read() for one, file in members}


def test_nothing_of_a_desk_is_in_them() -> None:
    names = sdist()
    known = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    made = {"", "PKG-INFO", "setup.cfg"}
    files = {name for name in names if not name.startswith("rft.egg-info")} - made
    tracked = set(known.stdout.split())
    directories = {str(parent) for name in tracked for parent in Path(name).parents}
    assert files <= tracked | directories


def test_they_are_of_what_is_here() -> None:
    differ = [
        name
        for name, data in sdist().items()
        if data is not None and (ROOT / name).is_file() and (ROOT / name).read_bytes() != data
    ]
    assert not differ, "a release is of what is committed: commit these, or take them back"


def test_their_license_is_said_and_there(tmp_path: Path) -> None:
    target = installed(Path(sys.executable), released(".whl"), tmp_path / "wheel")
    (notes,) = target.glob("rft-*.dist-info")
    said = (notes / "METADATA").read_text("utf-8").splitlines()
    assert "License-Expression: Apache-2.0" in said and "License-File: LICENSE" in said
    text = (ROOT / "LICENSE").read_bytes()
    assert (notes / "licenses" / "LICENSE").read_bytes() == text == sdist()["LICENSE"]
    assert hashlib.sha256(text).hexdigest() == APACHE


def test_the_quickstart_runs_by_the_other_python() -> None:
    """test_installed.py trains by the one that this runs by."""
    assert sys.version_info[:2] == (3, 11), (
        "make setup DEVICE=cpu PYTHON=python3.11, in a clean .venv-cpu"
    )


def test_on_another_python_without_dependencies(tmp_path: Path) -> None:
    target = installed(OTHER, released(".whl"), tmp_path / "installed")
    version = subprocess.run([OTHER, "--version"], capture_output=True, text=True, check=True)
    assert version.stdout.startswith("Python 3.12")
    torch = subprocess.run([OTHER, "-c", "import torch"], capture_output=True, text=True)
    assert "No module named 'torch'" in torch.stderr
    alone = rft(target, "--help", flags=("-S",))  # no site-packages: nothing but Python and rft
    assert (alone.returncode, alone.stderr) == (0, "") and "rft train" in alone.stdout
    assert str(target / "rft" / "launch") in alone.stdout
    lacking = rft(target, "config", flags=("-S",))
    assert lacking.returncode == 1 and "wants the package `" in lacking.stderr
    config = rft(target, "config", "experiment=quickstart", "seed=3")
    assert config.returncode == 0, config.stderr
    here = subprocess.run(
        [sys.executable, "-c", "from rft.cli import main; main()"]
        + ["config", "experiment=quickstart", "seed=3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert config.stdout == here.stdout
    said = rft(target, "config", "--explain", "trainer.grad_clip").stdout
    assert said.startswith("trainer.grad_clip: float >= 0") and "has no package `" in said
