"""Models and data by their names, asked of a hub that is served here by the client that everybody
has: what a start looks at, what it fetches, and what a later start keeps to.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rft import config as configs
from rft import preflight
from rft.config import Config, ConfigError
from rft.data.files import data_files, load_rows
from rft.ground import hubs
from rft.ground.names import read_hf_config
from rft.megatron.weights import HFReader
from rft.preflight import inputs_hubs, inputs_models
from rft.run import stages
from rft.sync.readers import file_tensors
from tests.unit.served_hub import ServedHub, serving
from tests.unit.test_config import changed, composed_grpo, grpo

MODEL, DATA = "someone/tiny", "someone/sums"
TASKS = "buffer.explorer_input.taskset"
CARD = b"""---
configs:
- config_name: plain
  data_files:
  - split: train
    path: rows/part-*.jsonl
  - split: held_out
    path: rows/rest.jsonl
---
"""


def lines(*rows: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def sums(first: int, count: int) -> bytes:
    return lines(
        *({"prompt": f"{n}+1", "response": str(n + 1)} for n in range(first, first + count))
    )


@pytest.fixture
def hub(assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedHub]:
    """With one model, and data in two files whose names say their order."""
    import datasets
    from huggingface_hub import constants

    with serving() as served:
        for name, value in {
            "ENDPOINT": served.address,
            "HUGGINGFACE_CO_URL_TEMPLATE": served.address
            + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_HUB_OFFLINE": False,
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "arrow")
        downloads = str(tmp_path / "arrow" / "downloads")
        monkeypatch.setattr(datasets.config, "DOWNLOADED_DATASETS_PATH", downloads)
        monkeypatch.setenv("HF_TOKEN", "planted-hub-token")
        model = {path.name: path.read_bytes() for path in (assets / "model").iterdir()}
        left = {"pytorch_model.bin": b"pickled", "tiny.gguf": b"cut", "modeling.py": b"print()"}
        served.repository(MODEL).push(model | left | {"original/consolidated.safetensors": b"2"})
        parts = {"rows/part-1.jsonl": sums(10, 8), "rows/part-0.jsonl": sums(0, 10)}
        rows = {**parts, "rows/rest.jsonl": sums(50, 2), "README.md": CARD}
        served.repository(f"datasets/{DATA}").push(rows, "v1")
        yield served


def started(assets: Path, root: Path, *more: str) -> Config:
    words = (
        f"checkpoint_root_dir={root}",
        "buffer.batch_size=4",
        f"model.model_path={MODEL}",
        f"{TASKS}.path={DATA}",
        *more,
    )
    (config,) = grpo(assets, root, *words)
    return config


def begun(config: Config) -> Config:
    """As a run writes down that it has begun, and reads it again."""
    resolved = configs.job_dir(config) / "resolved.yaml"
    configs.save(config, resolved)
    return configs.load(resolved)


def task_files(config: Config) -> list[Path]:
    taskset = config.buffer.explorer_input.taskset
    assert taskset is not None
    return data_files(taskset.path, taskset.split, taskset.subset_name, TASKS)


def test_names_are_looked_up_by_a_start_and_weights_come_after_all_checks(
    hub: ServedHub, assets: Path, tmp_path: Path
) -> None:
    config = started(assets, tmp_path)
    commit, of_data = (hub.repository(name).refs["main"] for name in (MODEL, f"datasets/{DATA}"))
    assert config.commits == {MODEL: commit, f"datasets/{DATA}": of_data}
    folder = Path(config.model.model_path)
    assert folder.name == commit and hubs.title(str(folder)) == "tiny"
    assert not [path for path in hub.fetched() if path.endswith(".safetensors")]
    assert config.trainer.total_steps == 18 // config.buffer.batch_size

    stages.ready([config], 0, lambda _: None)
    there = {path.name for path in folder.iterdir()}
    assert "model.safetensors" in there and "tokenizer.json" in there
    assert not there & {"pytorch_model.bin", "tiny.gguf", "modeling.py", "original"}
    before = len(hub.asked)
    stages.ready([config], 0, lambda _: None)
    assert len(hub.asked) == before, "what is there is not asked for again"

    rows = load_rows(task_files(config), TASKS)
    assert [row["prompt"] for row in rows] == [f"{n}+1" for n in range(18)]
    resolved = (configs.job_dir(begun(config)) / "resolved.yaml").read_text()
    assert commit in resolved and f"{DATA}@{of_data}" in resolved
    assert "planted-hub-token" in " ".join(hub.tokens), "the client has sent it"
    assert "planted-hub-token" not in resolved
    assert "rest.jsonl" not in " ".join(hub.fetched()), "nor another split"


def test_a_later_start_keeps_to_the_commits_when_the_hub_has_moved_on(
    hub: ServedHub, assets: Path, tmp_path: Path
) -> None:
    first = begun(started(assets, tmp_path))
    rows = hub.repository(f"datasets/{DATA}")
    moved = rows.commits[rows.refs["main"]] | {"rows/part-1.jsonl": sums(90, 4)}
    rows.push(moved)
    model = hub.repository(MODEL)
    model.push(model.commits[model.refs["main"]] | {"config.json": b"{}"})
    again = started(assets, tmp_path)
    assert again.commits == first.commits and again.model.model_path == first.model.model_path
    assert load_rows(task_files(again), TASKS)[17]["prompt"] == "17+1"
    with pytest.raises(ConfigError, match="architecture <none>"):
        started(assets, tmp_path, "name=another")


def test_a_revision_is_a_branch_a_tag_or_a_commit(
    hub: ServedHub, assets: Path, tmp_path: Path
) -> None:
    rows = hub.repository(f"datasets/{DATA}")
    old = rows.refs["v1"]
    rows.push({"train.jsonl": sums(70, 16)})
    for revision in ("v1", old):
        path = f"{TASKS}.path={DATA}@{revision}"
        config = started(assets, tmp_path, path, f"name={revision}")
        assert config.commits[f"datasets/{DATA}@{revision}"] == old
        assert len(load_rows(task_files(config), TASKS)) == 18
    one = f"{TASKS}.path=hf://datasets/{DATA}@v1/rows/part-0.jsonl"
    assert len(load_rows(task_files(started(assets, tmp_path, one)), TASKS)) == 10
    moved = started(assets, tmp_path)
    assert load_rows(task_files(moved), TASKS)[0]["prompt"] == "70+1"


def test_a_cache_is_enough_without_a_network(
    hub: ServedHub, assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    config = started(assets, tmp_path)
    stages.ready([config], 0, lambda _: None)
    hub.repositories.clear()
    before = len(hub.asked)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    again = started(assets, tmp_path, "name=another")
    stages.ready([again], 0, lambda _: None)
    assert again.commits == config.commits and len(hub.asked) == before
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE .* is set: unset it"):
        started(assets, tmp_path, "model.model_path=someone/else")


def test_what_a_hub_does_not_give_is_told_last_and_with_what_to_do(
    hub: ServedHub, assets: Path, tmp_path: Path
) -> None:
    hub.repository("someone/shy").push({"config.json": b"{}"})
    hub.repository("someone/shy").gated = True
    hub.repository("someone/pickled").push(
        {"config.json": (assets / "model" / "config.json").read_bytes(), "model.bin": b""}
    )
    odd = {"scripted.py": b"raise SystemExit(9)", "train.jsonl": sums(0, 9)}
    hub.repository("datasets/someone/scripted").push(odd)
    apart = b"---\nconfigs:\n- config_name: a\n  data_files: '*.csv'\n  sep: '|'\n---\n"
    hub.repository("datasets/someone/apart").push({"README.md": apart, "train.csv": b"a|b\n1|2"})
    for words, told in {
        f"{TASKS}.path=someone/scripted": r"no data set of plain files \(.*scripts .* scripted.py",
        f"{TASKS}.path=someone/apart": r"apart@\w+ has its files read with sep='\|'",
        f"{TASKS}.split=test": r"split: .* no split .test.; there are train, held_out",
        f"{TASKS}.subset_name=odd": r"subset_name: .* no subset 'odd'; there are plain",
        f"{TASKS}.path={DATA}@v9": r"v9 has no such revision; there are main, v1: write",
        f"{TASKS}.path=someone/none": r"no path here, and http.*datasets/someone/none is not there",
        "model.model_path=someone/none": r"model_path: someone/none is no path here.*HF_TOKEN",
        "model.model_path=someone/shy": r"gated: ask for access at http.*someone/shy, then set HF_",
        "model.model_path=someone/pickled": r"no \*\.safetensors: take a repository",
    }.items():
        with pytest.raises(ConfigError, match=told):
            started(assets, tmp_path, words)
    with pytest.raises(ConfigError) as refused:
        started(
            assets,
            tmp_path,
            "model.model_path=someone/none",
            "algorithm.kl_loss_fn=k9",
            "service.data_juicer.server_url=here",
            f"{TASKS}.path=someone/none",
        )
    told_of = [said.split(":")[0].split("=")[0] for said in refused.value.problems]
    assert told_of == [
        "algorithm.kl_loss_fn",
        "service.data_juicer.server_url",
        "model.model_path",
        f"{TASKS}.path",
    ]


def test_a_hub_that_is_down_is_one_sentence_for_each_name(
    assets: Path, tmp_path: Path, hub: ServedHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError) as refused:
        started(assets, tmp_path)
    assert len(refused.value.problems) == 2
    for said in refused.value.problems:
        for fix in (
            "127.0.0.1:9 cannot be asked",
            "HF_ENDPOINT",
            "`hf download",
            "HF_HUB_OFFLINE",
            "local folder",
        ):
            assert fix in said


def test_large_data_waits_until_nothing_else_is_refused(
    hub: ServedHub, assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs_hubs, "READ_AT_ONCE", 0)
    wrong = f"{TASKS}.format.prompt_key=question"
    with pytest.raises(ConfigError) as refused:
        started(assets, tmp_path, wrong, "algorithm.kl_loss_fn=k9")
    assert "k9" in str(refused.value) and "question" not in str(refused.value)
    assert not [path for path in hub.fetched() if path.endswith(".jsonl")]
    with pytest.raises(ConfigError, match=r"part-0.jsonl line 1 has no 'question'"):
        started(assets, tmp_path, wrong)
    judge = f"explorer.auxiliary_models=[{{name:judge,model_path:{MODEL}}}]"
    config = started(assets, tmp_path, judge)
    assert config.trainer.total_steps == 4
    assert config.explorer.auxiliary_models[0].model_path == config.model.model_path


def test_a_look_at_a_config_asks_no_hub(hub: ServedHub, assets: Path, tmp_path: Path) -> None:
    named = (f"checkpoint_root_dir={tmp_path}", f"model.model_path={MODEL}", f"{TASKS}.path={DATA}")
    drafts = configs.stage_drafts(changed(composed_grpo(assets), named))
    preflight.prepare(drafts, at_start=False)
    assert drafts[0].config.model.model_path == MODEL and not hub.asked


def test_two_processes_of_a_node_fetch_once(hub: ServedHub, assets: Path, tmp_path: Path) -> None:
    commit = hub.repository(MODEL).refs["main"]
    folder = tmp_path / "cache" / "models--someone--tiny" / "snapshots" / commit
    code = "import sys; from rft.ground import hubs; hubs.bring(sys.argv[1])"
    own = os.environ | {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home")}
    both = [subprocess.Popen([sys.executable, "-c", code, str(folder)], env=own) for _ in range(2)]
    assert [one.wait() for one in both] == [0, 0]
    fetched = hub.fetched()
    assert len(fetched) == len(set(fetched)) == len(list(folder.iterdir())), fetched
    assert (folder / "model.safetensors").exists()


def test_a_file_behind_a_url_is_known_by_its_content(
    hub: ServedHub, assets: Path, tmp_path: Path
) -> None:
    rows = hub.repository("datasets/someone/plain")
    rows.push({"sums.csv": b"prompt,response\n" + b"".join(b"%d+1,None\n" % n for n in range(9))})
    url = f"{hub.address}/datasets/someone/plain/resolve/main/sums.csv"
    config = begun(started(assets, tmp_path, f"{TASKS}.path={url}"))
    (file,) = task_files(config)
    assert file.name == "sums.csv" and config.commits[url] == file.parent.name
    assert load_rows([file], TASKS)[8] == {"prompt": "8+1", "response": "None"}
    rows.push({"sums.csv": b"prompt,response\n" + b"1+1,2\n" * 9})
    assert task_files(started(assets, tmp_path, f"{TASKS}.path={url}")) == [file]
    file.unlink()
    with pytest.raises(ConfigError, match="no longer the file with sha256"):
        started(assets, tmp_path, f"{TASKS}.path={url}")


def test_second_copies_beside_the_weights_of_a_directory_are_not_read(
    assets: Path, tmp_path: Path
) -> None:
    """As Mistral's repositories have one, in names of its own."""
    model = tmp_path / "model"
    shutil.copytree(assets / "model", model)
    save_file({"tok_embeddings.weight": torch.zeros(2)}, model / "consolidated.safetensors")
    HFReader(model, read_hf_config(model))
    assert "tok_embeddings.weight" not in dict(file_tensors(str(model)))
    whole = model / "model.safetensors"
    parts = [model / f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)]
    whole.rename(parts[0])
    shutil.copy(parts[0], parts[1])
    assert hubs.local_weights(model) == parts
    (model / hubs.INDEX).write_text(json.dumps({"weight_map": {"a": parts[1].name}}))
    assert hubs.local_weights(model) == parts[1:]


def test_a_model_without_all_of_its_weights_is_refused_before_the_start(
    assets: Path, tmp_path: Path
) -> None:
    """As where a download has broken off; ranks had found it behind the start of the engines."""
    model = tmp_path / "model"
    shutil.copytree(assets / "model", model)
    config = Config()
    config.model.model_path = str(model)
    problems = partial(inputs_models.MODELS[0].problems, config)
    assert not list(problems())
    (model / "model.safetensors").rename(model / "consolidated.safetensors")
    assert f"model.model_path={model} has no *.safetensors: " in "".join(problems())
    (model / hubs.INDEX).write_text(json.dumps({"weight_map": {"a": "part.safetensors"}}))
    assert "has no part.safetensors: " in "".join(problems())
    (model / hubs.INDEX).write_text("{")
    with pytest.raises(ConfigError, match="index.json cannot be read .*: fetch it again"):
        list(problems())
