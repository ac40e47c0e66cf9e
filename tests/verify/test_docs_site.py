"""The site that `make docs` makes: without a network, and with nothing that a reader's browser
fetches from elsewhere.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-docs" / "bin" / "python"
ALONE = ("unshare", "--net", "--map-root-user")
FETCHED = re.compile(
    r"<(?:script|img|iframe)[^>]*\bsrc=\"?(?:https?:)?//|<link[^>]*\bhref=\"?(?:https?:)?//[^>]*stylesheet"
)

pytestmark = pytest.mark.verify


def built(source: Path, site: Path) -> "subprocess.CompletedProcess[str]":
    assert PYTHON.exists(), "`make verify` and `make docs` make .venv-docs"
    command = [PYTHON, "-m", "mkdocs", "build", "--strict", "--site-dir", site]
    alone = subprocess.run([*ALONE, "true"]).returncode == 0  # as root, or where users may
    return subprocess.run(
        [*(ALONE if alone else ()), *command],
        cwd=source,
        env={"PATH": os.environ["PATH"], "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("source")
    shutil.copy(ROOT / "mkdocs.yml", place)
    shutil.copytree(ROOT / "docs", place / "docs")
    return place


def test_it_is_built_and_fetches_nothing(source: Path, tmp_path: Path) -> None:
    done = built(source, tmp_path / "site")
    assert done.returncode == 0, done.stderr
    pages = [*(tmp_path / "site").rglob("*.html")]
    made = len([*(source / "docs").rglob("*.md")]) + 1  # and 404.html
    assert len(pages) == made and (tmp_path / "site" / "search" / "search_index.json").is_file()
    for page in pages:
        assert not FETCHED.search(page.read_text("utf-8")), page


@pytest.mark.parametrize("link", ["(nowhere.md)", "(data.md#no-such-heading)", "(/data.md)"])
def test_a_link_that_leads_nowhere_is_an_error(link: str, source: Path, tmp_path: Path) -> None:
    page = source / "docs" / "debug.md"
    before = page.read_text("utf-8")
    page.write_text(f"{before}\n[a word]{link}\n", "utf-8")
    done = built(source, tmp_path / "site")
    page.write_text(before, "utf-8")
    assert done.returncode == 1 and "debug.md" in done.stderr
