"""The two things that a checkout hides: a wheel trains where there is no checkout, and the GPU lock
is what pyproject.toml resolves to, for machines that this one is not.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.verify, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]
PACKAGED = (
    *("rft", "hydra_plugins", "configs", "launch"),
    *("setup.py", "pyproject.toml", "README.md", "LICENSE"),
)
RELEASED = os.environ.get("RFT_DIST")  # by `make release`: whose wheel is taken
REQUIREMENTS = ROOT / "requirements"
UV = Path(sys.prefix) / "uv" / "bin" / "uv"
UNREACHABLE = re.compile(r"dns error|connect error|timed out|Connection refused")
# pip's finder of an editable install is the last way from the environment to a checkout
NO_CHECKOUT = """
import sys
sys.meta_path[:] = [one for one in sys.meta_path if "_EditableFinder" not in repr(one)]
"""
SHORT = (
    "experiment=quickstart",
    "monitor=none",
    "checkpoint_root_dir=runs",
    "stages.0.trainer.total_steps=2",
    "stages.0.trainer.stop_at_loss=null",
    "stages.0.buffer.train_batch_size=8",
    "stages.1.trainer.total_steps=2",
    "stages.1.buffer.batch_size=4",
    "stages.1.algorithm.repeat_times=2",
    "explorer.rollout_model.kv_cache_gb=0.25",
)


def pip(*arguments: object, cwd: Path) -> None:
    command = [sys.executable, "-m", "pip", *map(str, arguments), "-q", "--no-deps", "--no-index"]
    subprocess.run(command, cwd=cwd, check=True)


def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a wheel; the sources that it was made of are gone."""
    sources = tmp_path_factory.mktemp("sources")
    for name in PACKAGED:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(ROOT / name, sources)
    wheels = tmp_path_factory.mktemp("wheels")
    pip("wheel", "--no-build-isolation", "-w", wheels, sources, cwd=wheels)
    shutil.rmtree(sources)
    return wheels


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what `pip install` makes of these sources, or of the released wheel, and
    nothing else.
    """
    target = tmp_path_factory.mktemp("installed")
    wheels = Path(RELEASED) if RELEASED else built(tmp_path_factory)
    (wheel,) = wheels.glob("rft-*.whl")
    pip("install", "--target", target, wheel, cwd=wheels)
    (target / "sitecustomize.py").write_text(NO_CHECKOUT, encoding="utf-8")
    return target


def python(installed: Path, cwd: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_wheel_has_its_configs_and_scripts(installed: Path, tmp_path: Path) -> None:
    help_line = python(installed, tmp_path, "-c", "from rft import cli; print(cli.USAGE)")
    scripts = Path(help_line.strip().splitlines()[-1].split(": ")[1])
    assert scripts == installed / "rft" / "launch"
    for name, there in (("launch", scripts), ("configs", installed / "rft" / "configs")):
        here = {path.relative_to(ROOT / name) for path in (ROOT / name).rglob("*.*")}
        found = {path.relative_to(there) for path in there.rglob("*.*")}
        assert here == found - {path for path in found if path.suffix == ".pyc"}
    assert all(os.access(script, os.X_OK) for script in scripts.glob("*.sh"))
    page = python(installed, tmp_path, "-c", "from rft.tools import studio; print(studio.PAGE)")
    assert Path(page.strip()).is_file()


def test_a_wheel_trains_without_a_checkout(installed: Path, tmp_path: Path) -> None:
    lines = python(installed, tmp_path, "-m", "rft.train", *SHORT).splitlines()
    assert set(json.loads(lines[-1])["quickstart"]) == {"eval_sft", "eval_rft", "seconds"}
    logs = tmp_path / "runs" / "rft" / "quickstart"
    assert (logs / "rft" / "huggingface" / "step_00000002").is_dir()


def test_the_gpu_lock_is_what_resolves(tmp_path: Path) -> None:
    """uv keeps what a lock says as long as it fits, so a newer release of something changes
    nothing; a pin that does not fit, lacks or is asked for by nobody does.
    """
    if not UV.exists():
        pytest.skip(f"{UV} is missing; `make verify` fetches it")
    pins = "".join((REQUIREMENTS / name).read_text() for name in ("gpu.lock", "gpu-te.lock"))
    lock = tmp_path / "gpu.lock"
    lock.write_text(pins, encoding="utf-8")
    command = [UV, "pip", "compile", "-q", "--config-file", REQUIREMENTS / "uv.toml"]
    cache = {"UV_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [*command, ROOT / "pyproject.toml", "-o", lock],
        env=os.environ | cache,
        capture_output=True,
        text=True,
    )
    if done.returncode and UNREACHABLE.search(done.stderr):
        pytest.skip(f"no package index can be reached: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert sorted(lock.read_text().split()) == sorted(pins.split())
    read = sum(file.stat().st_size for file in (tmp_path / "cache").rglob("*") if file.is_file())
    assert read < 200e6, "wheels were downloaded, not metadata"
