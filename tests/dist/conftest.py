"""One set of rank processes and one set of toy checkpoints for the whole session."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rft.tools.toy import write_model

from ranks import Ranks

SMALL = {"hidden": 48, "layers": 4, "heads": 8, "kv_heads": 2, "head_dim": 8, "ffn": 64}


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    pool = Ranks()
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models: every family, tied and untied, one of them in several files."""
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
