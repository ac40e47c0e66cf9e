"""The pages of docs/: each ends with where its code is, and each has a place on the site that
`make docs` makes. tests/verify/test_docs_site.py makes it.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rft.config import leaf_keys

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
LAST = "## Where the code is"
NAMED = re.compile(
    r"`((?:rft|configs|launch|tests|bench|requirements|hydra_plugins)/[\w./*]*|\w+\.py)`"
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_a_page_ends_with_where_its_code_is(page: Path) -> None:
    headings = re.findall(r"^## .*$", page.read_text("utf-8"), re.MULTILINE)
    assert headings[-1] == LAST
    said = page.read_text("utf-8").rpartition(LAST)[2]
    found = NAMED.findall(said)
    assert found or "](" in said, "it names no file"
    directories = [ROOT]
    for name in found:  # a bare name lies beside the one before it
        there = next((one for one in directories if [*one.glob(name)]), None)
        assert there, f"{name} is not there"
        path = there / name
        directories = [ROOT, path if path.is_dir() else path.parent]


def pages_of(nav: Any) -> Iterator[str]:
    for one in nav:
        if isinstance(one, str):
            yield one
        else:
            for inner in one.values():
                yield from [inner] if isinstance(inner, str) else pages_of(inner)


def test_the_site_has_every_page_once_and_fetches_nothing() -> None:
    listed = [*pages_of(SITE["nav"])]
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in PAGES)
    assert SITE["theme"]["font"] is False and "extra" not in SITE and SITE["plugins"] == ["search"]
    assert {*SITE["validation"]["links"].values()} == {"warn"}, "--strict makes them errors"


def test_the_keys_that_stand_for_those_of_trl_are_there() -> None:
    text = (DOCS / "tutorials" / "coming_from.md").read_text("utf-8")
    rows = re.findall(r"^\| `[^|]*\| `([\w.]+)` \|", text.partition("## From TRL")[2], re.MULTILINE)
    assert len(rows) > 10 and not [key for key in rows if key not in leaf_keys()]


def test_the_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()
    assert len(lines) < 150
    assert lines.count("<!-- demo: begin -->") == lines.count("<!-- demo: end -->") == 1
