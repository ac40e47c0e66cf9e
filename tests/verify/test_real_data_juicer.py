"""Data-Juicer through its own package: operators of py-data-juicer in the environment that
`make env-data-juicer` builds, as a task pipeline and as a stage of the experience pipeline.
"""

import asyncio
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rft import preflight
from rft.config import DataJuicerConfig
from rft.extras.pipeline import data_juicer
from rft.extras.pipeline.data_juicer import JuicerClient, JuicerServer, Refused
from rft.extras.pipeline.worker_process import OperatorFailed
from rft.run import stages
from tests.unit.conftest import assets
from tests.unit.test_data_juicer import processed
from tests.unit.test_experience_pipeline import group
from tests.unit.test_task_pipeline import configured, op, rows_of, write

pytestmark = [
    pytest.mark.verify,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not data_juicer.own_python().is_file(), reason="make env-data-juicer"),
]
__all__ = ["assets"]  # the fixture
STARTED = DataJuicerConfig(auto_start=True)
LINK = "look at https://example.org/a?b=c for more of it"
SAME = "again and again and again and again and again and again"
ROWS = [
    {"prompt": LINK, "response": "1"},
    {"prompt": SAME, "response": "2"},
    {"prompt": "no", "response": "3"},
    {"prompt": "how many legs has a spider, and how many a bee?", "response": "4"},
    {"prompt": "how many legs has a spider, and how many a bee?", "response": "5"},
]


def test_rows_of_a_task_pipeline_go_through_real_operators(assets: Path, tmp_path: Path) -> None:
    operators = [
        op("text_length_filter", min_len=5, max_len=70),
        op("clean_links_mapper"),
        op("word_repetition_filter", rep_len=2, max_ratio=0.5),
        op("document_deduplicator"),
    ]
    config = configured(
        assets,
        tmp_path,
        write(tmp_path / "raw.jsonl", ROWS),
        operators,
        "service.data_juicer.auto_start=true",
        "data_processor.task_pipeline.target_fields=[prompt,response]",
        "buffer.batch_size=1",
    )
    stages.ready([config], 0, preflight.check)
    told = [(row["prompt"], row["response"]) for row in rows_of(tmp_path / "made.jsonl")]
    assert sorted(told) == [(ROWS[3]["prompt"], "4"), ("look at  for more of it", "1")]


def test_experiences_have_the_stats_of_real_operators(tmp_path: Path) -> None:
    keys = {"text_key": "response_text"}
    found = processed(
        tmp_path,
        STARTED,
        {"text_length_filter": {"min_len": 1, **keys}},
        {"alphanumeric_filter": {"tokenization": False, "min_ratio": 0.0, **keys}},
    )
    given = group(3, 0.0, 1.0, 2.0)
    assert [list(one.tokens) for one in found] == [list(one.tokens) for one in given]
    assert [one.info for one in found] == [{"text_len": 3, "alnum_ratio": pytest.approx(2 / 3)}] * 3
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "project_name: short\nnp: 4\ntext_keys: response_text\n"
        "process:\n  - text_length_filter:\n      min_len: 4\n"
    )
    assert processed(tmp_path, STARTED, config_path=str(recipe)) == [], "all three are shorter"
    recipe.write_text("dataset_path: rows.jsonl\nprocess:\n  - clean_links_mapper:\n")
    with pytest.raises(OperatorFailed, match="dataset_path is not for this service"):
        processed(tmp_path, STARTED, config_path=str(recipe))


def packages() -> set[str]:
    return {one.name for one in data_juicer.own_python().parents[1].glob("lib/*/site-packages/*")}


def test_what_an_operator_lacks_is_said_and_never_installed(tmp_path: Path) -> None:
    """Data-Juicer itself would install it: torch, for one."""
    before = packages()

    async def refusals() -> list[str]:
        server, said = JuicerServer(STARTED, tmp_path / "log"), []
        stranger = JuicerClient(await server.start(), 60.0)
        with pytest.raises(Refused, match="without the token"):
            await stranger.create({"operators": [{"clean_links_mapper": {}}]})
        await stranger.close()
        client = JuicerClient(server.address, 60.0)
        try:
            for asked in (
                {"perplexity_filter": {}},
                {"nonsense": {}},
                {"text_length_filter": {"a": 1}},
            ):
                config: dict[str, Any] = {"pipeline_type": "experience", "operators": [asked]}
                with pytest.raises(Refused) as refused:
                    await client.create(config)
                said.append(str(refused.value))
            missing = {"text_length_filter": {"text_key": "nowhere"}}
            session = await client.create({"pipeline_type": "experience", "operators": [missing]})
            with pytest.raises(Refused) as refused:
                await client.process_experience(session, [{"index": 0}])
            said.append(str(refused.value))
        finally:
            await client.close()
            server.stop()
        return said

    lacking, unknown, wrong, failed = asyncio.run(refusals())
    assert "perplexity_filter: it lacks a package, and nothing is installed" in lacking
    assert "sentencepiece" in lacking
    assert (
        "nonsense: " in unknown
        and "answered 400" in unknown
        and "answered 400" in wrong
        and "'a'" in wrong
    )
    assert "answered 500" in failed and "text_length_filter: KeyError: 'nowhere'" in failed
    assert packages() == before and "torch" not in packages()


def test_another_major_version_is_refused_by_name(tmp_path: Path) -> None:
    """A package that says so of itself, in front of the real one."""
    told = tmp_path / "py_data_juicer-0.2.0.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: py-data-juicer\nVersion: 0.2.0\n")
    ran = subprocess.run(
        [data_juicer.own_python(), str(data_juicer.SERVICE), "--check"],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 1 and "py-data-juicer 0.2.0 is of another major version" in ran.stderr
    asked = [data_juicer.own_python(), "-I", str(data_juicer.SERVICE), "--check"]
    assert subprocess.run(asked).returncode == 0
