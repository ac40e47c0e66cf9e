"""A whole run by names of a hub: ranks, engine and explorer have the model and the rows, and when
the run goes on it is with the same ones, although the hub has moved on and then is gone.
"""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.unit.served_hub import serving

from runs import overrides, step_rows, train, write_assets

LONG_S = 600.0  # three starts of an engine, on a busy machine
pytestmark = [pytest.mark.verify, pytest.mark.timeout(1800)]


def test_a_run_by_names_goes_on_with_what_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assets = write_assets(tmp_path / "assets")
    model = {path.name: path.read_bytes() for path in (assets / "model").iterdir()}
    rows = {"train.jsonl": (assets / "train.jsonl").read_bytes()}
    names = (
        "model.model_path=someone/tiny",
        "buffer.explorer_input.taskset.path=someone/sums@main",
    )
    with serving() as hub:
        began = {
            "someone/tiny": hub.repository("someone/tiny").push(model),
            "datasets/someone/sums@main": hub.repository("datasets/someone/sums").push(rows),
        }
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        given = overrides(tmp_path, "run", assets, *names, "trainer.save_hf_checkpoint=last")
        with train(*given, "trainer.total_steps=1") as run:
            run.wait_for(r"someone/tiny is \w{40}", LONG_S)
            assert (run.end(LONG_S), run.errors()) == (0, "")
        hub.repository("someone/tiny").push({"config.json": b"{}"})
        hub.repository("datasets/someone/sums").push({"train.jsonl": b"{}"})
        with train(*given, "trainer.total_steps=2") as run:
            assert (run.end(LONG_S), run.errors()) == (0, "")
    with train(*given, "trainer.total_steps=3") as run:  # the hub is gone
        assert (run.end(LONG_S), run.errors()) == (0, "")
    job = tmp_path / "rft" / "run"
    assert len(step_rows(job)) == 3
    assert OmegaConf.load(job / "resolved.yaml").commits == began
    export = job / "huggingface" / "step_00000003"
    assert (export / "tokenizer.json").read_bytes() == model["tokenizer.json"]
    assert not (export / "tokenizer.json").is_symlink()
