"""Publication by saves, as the training loop sees it; the engines' side is in
tests/e2e/test_sync_methods.py.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from states import OneRank, State, managed

from rft.checkpoint.catalog import read_manifest
from rft.checkpoint.records import SaveFailed
from rft.config import SynchronizerConfig
from rft.sync.origins import CheckpointOrigin
from rft.sync.publisher import Publisher


def publisher_of(saves: Any, engines: bool, deadline_s: float = 20.0) -> Publisher:
    publisher = Publisher(
        CheckpointOrigin(
            OneRank(), saves, None, SynchronizerConfig(), 1, deadline_s, engines=engines
        )
    )
    publisher.connect()
    return publisher


def test_a_version_is_there_when_its_save_is_committed(tmp_path: Path) -> None:
    state = State({"model/w": torch.zeros(50, 30)})
    with managed(tmp_path / "root", state) as manager:
        publisher = publisher_of(manager, engines=False)
        for version in (1, 2):
            publisher.start(version)
            assert publisher.claim_save(version) and not publisher.claim_save(version)
            manager.save(version, state.fill(version), {}, full=False, weights=True)
            manager.before_update()
            publisher.release()
        publisher.start(3, due=False)
        assert publisher.version == 2 and not publisher.claim_save(3)
        seal = read_manifest(manager.storage, "weights/v_00000002").seal
        assert publisher.origin.digest == seal
        publisher.close()


def claimed(publisher: Publisher, version: int) -> None:
    publisher.start(version)
    assert publisher.claim_save(version)


def test_a_save_that_fails_ends_a_run_whose_engines_wait_for_it_and_no_other() -> None:
    full = SaveFailed(id="a", step=4, cause="disk full")
    for engines in (True, False):
        saves = SimpleNamespace(storage=None, hear=None)
        publisher = publisher_of(saves, engines)
        claimed(publisher, 4)
        saves.hear(SaveFailed(id="b", step=3, cause="of an earlier one"))
        saves.hear(full)
        if engines:
            with pytest.raises(
                RuntimeError, match="weight sync failed: version 4 was not saved: disk full"
            ):
                publisher.wait()
        else:
            publisher.wait()
            assert publisher.version == 4


def test_a_save_that_never_ends_is_named() -> None:
    publisher = publisher_of(
        SimpleNamespace(storage=None, hear=None), engines=True, deadline_s=0.01
    )
    claimed(publisher, 4)
    with pytest.raises(RuntimeError, match=r"version 4 is not committed after 0.01 s"):
        publisher.wait()
