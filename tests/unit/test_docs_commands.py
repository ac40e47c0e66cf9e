"""Every command in README and docs is one that exists: its keys compose, its tool and its files are
there.

tests/verify/test_docs_commands_run.py runs them; this keeps a renamed key, option or file from
staying in a page.
"""

import importlib.util
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from rft import cli
from rft import config as configs
from rft.config import RowFormatConfig, verl_words
from rft.config import file as config_file
from rft.data.files import check_rows, task_needs
from rft.data.supervised import row_needs
from rft.extras import sweep as sweeps

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# each is done as a whole by tests/verify/test_tutorials.py
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
SHELL = re.compile(r"```sh\n(.*?)```", re.DOTALL)
QUICKSTART = re.compile(r'make quickstart ARGS="(.*)"')
RFT = re.compile(
    r"(?:^|\s)(?:python -m rft\.train|rft (?:train|config|doctor|plan)|launch/\w+\.sh)\s+(.*)"
)


def commands(pages: Sequence[Path] = PAGES) -> list[tuple[str, str]]:
    """(page, command) of every line of a shell block; lines that end in a backslash go on."""
    found = []
    for page in pages:
        for block in SHELL.findall(page.read_text(encoding="utf-8")):
            lines = block.replace("\\\n", " ").splitlines()
            found += [
                (page.name, line.strip())
                for line in lines
                if line.strip() and not line.startswith("#")
            ]
    return found


def words(line: str) -> list[str]:
    return [word for word in shlex.split(line, comments=True) if word != "..."]


CHANGED = sorted({(page, line) for page, line in commands() if QUICKSTART.match(line)})
EVERYWHERE = commands([*PAGES, *TUTORIALS])
OVERRIDES = sorted(
    {(page, line) for page, line in EVERYWHERE if RFT.search(line) and "--config" not in line}
)
TOOLS = sorted(
    {(page, line) for page, line in EVERYWHERE if re.match(r"rft (?!train\b)[a-z]", line)}
)
FILES = sorted(
    {
        (page, word)
        for page, line in commands()
        if not line.startswith("cat ")
        for word in words(line)
        if re.fullmatch(r"(tests|bench|launch|configs|docs)/[\w./]+(::\w+)?", word)
        or re.fullmatch(r"bench\.\w+", word)
    }
)


ROWS = re.findall(
    r"```jsonl (\w+)\n(.*?)```", (ROOT / "docs" / "data.md").read_text(encoding="utf-8"), re.DOTALL
)


@pytest.mark.parametrize("kind,rows", ROWS)
def test_rows_of_the_page_on_data_are_taken(kind: str, rows: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(rows, encoding="utf-8")
    of = RowFormatConfig(
        prompt_type="plaintext" if kind in ("plaintext", "text_pairs", "text") else "messages"
    )
    schema = "dpo" if kind.endswith("pairs") else {"supervised": "sft", "text": "cpt"}.get(kind)
    needs = row_needs(of, "key", schema) if schema else task_needs(of, "key")
    assert check_rows([file], needs, "key") == len(rows.splitlines())


def test_there_are_commands() -> None:
    assert len(OVERRIDES) > 20 and len(TOOLS) > 5 and len(FILES) > 5 and len(ROWS) == 7


@pytest.mark.parametrize("page,line", OVERRIDES)
def test_its_keys_compose(page: str, line: str) -> None:
    # what ssh is told to run
    quoted = [word for word in words(line) if " " in word and RFT.search(word)]
    found = RFT.search((quoted or [line])[0])
    assert found
    ours, _, theirs = found[1].partition(verl_words.FLAG)
    if theirs:
        config_file.registered([verl_words.FLAG, *(w for w in words(theirs) if "=" in w)])
    given = [word for word in words(ours) if "=" in word]
    configs.check_overrides(given)
    if not sweeps.is_multirun(words(line)):
        configs.compose([word for word in given if not word.startswith("hydra")])


@pytest.mark.parametrize("page,line", CHANGED)
def test_the_quickstart_can_be_changed_like_this(page: str, line: str) -> None:
    found = QUICKSTART.match(line)
    assert found
    given = ["experiment=quickstart", *shlex.split(found[1])]
    configs.check_overrides(given)
    configs.check_stage_overrides(configs.compose(given), given)


def test_every_tool_exists() -> None:
    tools = {(page, words(line)[1]) for page, line in TOOLS}
    assert {tool for _, tool in tools} <= {*cli.TOOLS}, tools
    modules = {tool: f"rft.tools.{cli.TOOLS[tool]}" for _, tool in tools}
    assert not [tool for tool, module in modules.items() if not importlib.util.find_spec(module)]


def test_every_file_is_there() -> None:
    lost = [(page, word) for page, word in FILES if not (ROOT / path_of(word)).exists()]
    assert not lost, "pages name files that do not exist"


def path_of(word: str) -> str:
    return f"{word.replace('.', '/')}.py" if word.startswith("bench.") else word.partition("::")[0]
