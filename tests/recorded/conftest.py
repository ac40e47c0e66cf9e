"""What the recorded tests share."""

from pathlib import Path

import pytest

from tests.recorded import entry


@pytest.fixture(scope="session")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the model and the rows that recorded configs speak of."""
    root = tmp_path_factory.mktemp("recipes")
    entry.write_assets(root)
    return root
