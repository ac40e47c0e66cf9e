"""One set of toy checkpoints for the whole session; prints, at its end, how long the tests of each
directory took.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

SMALL = {"hidden": 48, "layers": 4, "heads": 8, "kv_heads": 2, "head_dim": 8, "ffn": 64}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--way",
        choices=("sockets", "nccl"),
        default="sockets",
        help="how weights travel in tests of whole engines: a CPU's own, or what stands for NCCL",
    )


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models: every family, tied and untied, one of them in several files."""
    from rft.tools.toy import write_model

    root = tmp_path_factory.mktemp("models")
    scaled = {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    return {
        "llama": write_model(root / "llama", "llama", tied=False, **SMALL),
        "qwen2": write_model(root / "qwen2", "qwen2", tied=True, max_shard_size="60KB", **SMALL),
        "qwen2-one-file": write_model(root / "qwen2-one", "qwen2", tied=True, **SMALL),
        "qwen3": write_model(root / "qwen3", "qwen3", tied=True, **SMALL),
        "moe": write_model(root / "moe", "qwen3_moe", tied=False, **SMALL),
        "llama3": with_rope(write_model(root / "llama3", "llama", tied=True, **SMALL), scaled),
        "qwen3-untied": write_model(
            root / "qwen3u", "qwen3", tied=False, max_shard_size="60KB", **SMALL
        ),
    }


def with_rope(path: Path, rope: dict[str, Any]) -> Path:
    """The same weights under other rotary parameters."""
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config["rope_parameters"] = rope | {"original_max_position_embeddings": 64}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):  # of set-up, call or tear-down
                seconds["/".join(report.nodeid.split("/")[:2])] += report.duration
    terminalreporter.section("seconds per directory")
    for directory, total in seconds.most_common():
        terminalreporter.write_line(f"{total:8.1f}  {directory}")
