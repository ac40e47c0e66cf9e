"""Rank processes that see Transformer Engine and a GPU where there is neither: the stand-ins in
`te/`.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from test_newest_megatron import newest_megatron

from ranks import Ranks

ENGINE = Path(__file__).parent / "te"


@pytest.fixture(
    scope="session", params=["newest", pytest.param("oldest", marks=pytest.mark.verify)]
)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """With Transformer Engine and either megatron-core that is supported."""
    pool = Ranks(ENGINE, *([newest_megatron()] if request.param == "newest" else []))
    yield pool
    pool.stop()
