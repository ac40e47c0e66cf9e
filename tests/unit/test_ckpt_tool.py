"""`rft ckpt` on checkpoints made by hand: what it says, what it finds, and how it ends."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from made import commit, source, sources_of, storage_at
from safetensors.torch import load_file
from states import managed, plain, save, trainer_config, until

from rft.checkpoint import catalog, fence, single
from rft.checkpoint.catalog import list_entries
from rft.checkpoint.reader import Checkpoint
from rft.checkpoint.records import Retention
from rft.checkpoint.single import Busy
from rft.checkpoint.storage import open_storage
from rft.tools.ckpt import main, values
from rft.tools.toy import write_model

SHAPE = {"hidden": 48, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 64}
Said = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tool") / "qwen3", "qwen3", tied=True, **SHAPE)


@pytest.fixture
def job(model: Path, tmp_path: Path) -> Path:
    """Two checkpoints whose weights are 1.5 apart."""
    job = tmp_path / "runs" / "project" / "name"
    job.mkdir(parents=True)
    about = {"model": str(model), "layout": {"tp": 2, "pp": 1, "dp": 4}, "dtype": "fp32"}
    commit(job, 3, sources_of(model), about=about, loop={"journal": 10, "scores": {"3": 0.25}})
    commit(
        job,
        12,
        sources_of(model, add=1.5),
        about=about,
        loop={"journal": 40, "scores": {"3": 0.25, "12": 0.5}},
    )
    return job


def test_ls_tells_what_agents_hold_while_they_live(tmp_path: Path, capsys: Said) -> None:
    state, job = plain(), tmp_path / "job"
    root, metrics = job / "checkpoints", job / "metrics.jsonl"
    config = trainer_config(memory_interval=1)
    control = fence.control_dir(job)
    with managed(root, state, config=config, control=control) as manager:
        save(manager, 1, state.fill(1))
        manager.save(2, state.fill(2), {}, full=False, memory=True)
        manager.before_update()
        until(lambda: manager.in_memory == 2, "it is kept in memory")
        (agent,) = map(fence.holder, fence.living_agents(control))
        assert main(["ls", str(job)]) == 0 and "in memory" not in capsys.readouterr().out
        rows = {"step": 2, **manager.metrics()}, {"step": 3, "loss": 0.1}
        metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert main(["ls", str(job)]) == 0
        assert capsys.readouterr().out.endswith(f"\nin memory: step 2, by agents {agent}\n")
    assert main(["ls", str(job)]) == 0 and "in memory" not in capsys.readouterr().out


def flip(job: Path, step: int, at: int = 1000) -> None:
    file = job / "checkpoints" / f"step_{step:08d}" / "r00000.bin"
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def test_ls_tells_all_apart(job: Path, capsys: Said) -> None:
    root = job / "checkpoints"
    (root / "step_00000020.tmp-e0003n0000").mkdir()
    (root / ".bad-step_00000001-0123").mkdir()
    (root / "notes.txt").write_text("mine")
    (job / "huggingface" / "step_00000003").mkdir(parents=True)
    assert main(["tag", f"{job}@3", "paper"]) == 0
    capsys.readouterr()
    assert main(["ls", str(job)]) == 0
    head, *rows = capsys.readouterr().out.splitlines()[1:]
    assert head.split() == [
        "name",
        "step",
        "attempt",
        "age",
        "size",
        "layout",
        "score",
        "tag",
        "exported",
    ]
    assert re.fullmatch(
        r"step_00000003 +3 +1 +\d+ s +0\.\d\d MB +tp2 dp4 +0\.25 +paper +yes", rows[0]
    )
    assert re.fullmatch(r"step_00000012 +12 +2 +\d+ s +0\.\d\d MB +tp2 dp4 +0\.5 +LATEST", rows[1])
    assert rows[2:] == [
        "unfinished: step_00000020.tmp-e0003n0000",
        "set aside as damaged: .bad-step_00000001-0123",
    ]


def test_ls_names_a_damaged_manifest(job: Path, capsys: Said) -> None:
    manifest = job / "checkpoints" / "step_00000012" / "MANIFEST.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"step":12', b'"step":13'))
    assert main(["ls", str(job)]) == 1
    assert re.search(
        r"damaged manifest: step_00000012: .*seal does not fit", capsys.readouterr().out
    )


@pytest.mark.parametrize(
    "typed", ["{job}", "{job}/checkpoints", "{job}/..", "{job}/../..", "{job}@12"]
)
def test_a_run_by_any_of_its_directories(job: Path, capsys: Said, typed: str) -> None:
    assert main(["show", typed.format(job=job)]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[0] == f"{(job / 'checkpoints').resolve()}/step_00000012"
    assert re.search(r"model +24 tensors +[\d,]+ elements +float32", said)
    assert "journal                 40" in said and "scores.12               0.5" in said


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("{job}/nothing", "no such directory"),
        ("{model}", "no checkpoints here"),
        ("{job}@4", "no checkpoint of step 4; committed steps: 3, 12"),
        ("{job}/checkpoints/step_00000009", "is no committed checkpoint"),
        ("{job}/../..", "holds 2 runs, give one: "),
    ],
)
def test_wrong_input_is_one_line(
    job: Path, model: Path, capsys: Said, typed: str, words: str
) -> None:
    if typed == "{job}/../..":
        commit(job.parent / "other", 1, sources_of(model))
    assert main(["show", typed.format(job=job, model=model)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1 and words in said.err


def test_a_config_of_another_rft_names_no_storage(tmp_path: Path, capsys: Said) -> None:
    (tmp_path / "resolved.yaml").write_text("name: earlier")
    assert main(["ls", str(tmp_path)]) == 2
    assert "no checkpoints here" in capsys.readouterr().err


def test_verify_names_file_and_chunk(job: Path, capsys: Said) -> None:
    assert main(["verify", str(job)]) == 0
    assert len(re.findall("good", capsys.readouterr().out)) == 2
    flip(job, 3)
    assert main(["verify", str(job)]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert re.search(
        r"step_00000003  DAMAGED .*step_00000003/r00000\.bin was changed: chunk 0", first
    )
    assert "good" in second
    assert main(["verify", f"{job}@12"]) == 0
    assert main(["verify", str(job / "checkpoints" / "step_00000003")]) == 1


def test_diff_says_which_and_how_much(job: Path, model: Path, capsys: Said) -> None:
    assert main(["diff", f"{job}@3", f"{job}@3"]) == 0
    assert capsys.readouterr().out.endswith(
        "0 of 24 tensors that both hold alike differ in value\n"
    )
    assert main(["diff", f"{job}@3", f"{job}@12"]) == 1
    said = capsys.readouterr().out
    assert len(re.findall(r"model/\S+: [\d,]+ of [\d,]+ elements, by at most 1\.5\n", said)) == 24
    assert "cut journal: 10 and 40\n" in said and "cut step: 3 and 12\n" in said
    other = job.parent / "other"
    commit(
        other,
        3,
        [*sources_of(model, "bfloat16"), source("exp_avg/x", "float32", np.zeros(8, "u1"), (2,))],
    )
    assert main(["diff", f"{job}@3", str(other)]) == 1
    said = capsys.readouterr().out
    assert "exp_avg/x: only in " in said
    assert len(re.findall(r"model/\S+: float32 (\[.*\]) and bfloat16 \1\n", said)) == 8
    assert "... and 16 more like that" in said


def test_diff_sees_one_flipped_sign_of_bf16(tmp_path: Path, capsys: Said) -> None:
    one = torch.tensor([0.0, 1.5, float("inf")], dtype=torch.bfloat16)
    two = torch.tensor([-0.0, -1.5, float("inf")], dtype=torch.bfloat16)
    for step, value in ((1, one), (2, two)):
        commit(
            tmp_path, step, [source("model/w", "bfloat16", value.view(torch.uint8).numpy(), (3,))]
        )
    assert main(["diff", f"{tmp_path}@1", f"{tmp_path}@2"]) == 1
    assert "model/w: 2 of 3 elements, by at most 3\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.uint8]
)
def test_values_are_torchs(dtype: torch.dtype) -> None:
    value = (torch.randn(64) * 50).abs().to(dtype)
    raw = np.frombuffer(
        value.view(torch.uint8).numpy().tobytes(), dtype=f"<u{value.element_size()}"
    )
    assert values(raw, str(dtype).removeprefix("torch.")).tolist() == value.double().tolist()


def test_a_tag_keeps_and_untag_lets_go(job: Path, capsys: Said) -> None:
    storage = storage_at(job / "checkpoints")
    one = Retention(last=1)
    assert main(["untag", f"{job}@3"]) == 2
    assert main(["tag", f"{job}@3"]) == 0
    assert catalog.expired(list_entries(storage), one) == []
    assert main(["untag", f"{job}@3"]) == 0
    assert [entry.step for entry in catalog.expired(list_entries(storage), one)] == [3]


def test_of_saves_that_are_known_only_the_newest_are_read_again(
    job: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "FRESH", 1)
    storage, known = storage_at(job / "checkpoints"), dict[str, catalog.Entry]()
    read, real = list[str](), catalog.read_manifest
    monkeypatch.setattr(
        catalog, "read_manifest", lambda storage, path: read.append(path) or real(storage, path)
    )
    first = list_entries(storage, "", known)
    assert [one.step for one in first] == [3, 12] and len(read) == 2
    assert main(["tag", f"{job}@3"]) == 0
    read.clear()
    assert [one.tagged for one in list_entries(storage, "", known)] == [True, False]
    assert read == ["step_00000012"]
    (job / "checkpoints" / "step_00000012" / "MANIFEST.json").write_text("{")
    assert [one.step for one in list_entries(storage, "", known)] == [3]
    storage.remove("step_00000003")
    assert list_entries(storage, "", known) == [] == list(known)


def test_export_to_hugging_face(job: Path, model: Path, capsys: Said) -> None:
    target = job / "out"
    assert main(["export", f"{job}@3", str(target)]) == 0
    found, wanted = load_file(target / "model.safetensors"), load_file(model / "model.safetensors")
    assert found.keys() == wanted.keys() and all(
        torch.equal(found[name], wanted[name]) for name in wanted
    )
    assert main(["export", f"{job}@3", str(target)]) == 0
    assert "is there already" in capsys.readouterr().out
    (job / "file").touch()
    assert main(["export", f"{job}@3", str(job / "file")]) == 2 == main(["export", str(job), "."])
    assert capsys.readouterr().err.count("is no export: give a path that is new") == 2
    flip(job, 12)
    assert main(["export", str(job), str(job / "bad")]) == 1
    assert not (job / "bad").exists() and "chunk 0" in capsys.readouterr().err


def test_what_an_import_cannot_be(job: Path, model: Path, tmp_path: Path, capsys: Said) -> None:
    new = tmp_path / "new"
    assert main(["import", str(model), str(new), "--step", "-3"]) == 2 and not new.exists()
    assert "--step -3: steps are counted from 0" in capsys.readouterr().err
    new.touch()
    for words in (["import", str(model), str(new)], ["ls", str(new)], ["show", str(new)]):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert "Errno" not in said and ("is a file" in said or "no such directory" in said)


def test_a_reader_that_has_seen_enough_is_no_error_of_a_checkpoint(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr("sys.stdout", Closed())
    with pytest.raises(BrokenPipeError):
        main(["show", str(job), "--tensors"])


def test_there_and_back(job: Path, model: Path, tmp_path: Path, capsys: Said) -> None:
    """rft -> torch_dist -> rft -> Hugging Face -> rft, in bf16 with
    masters: the weights stay the same bits.
    """
    steps = (
        ["export", f"{job}@12", str(tmp_path / "megatron"), "--to", "torch_dist"],
        [
            "import",
            str(tmp_path / "megatron"),
            str(tmp_path / "b"),
            "--model",
            str(model),
            "--step",
            "12",
        ],
        ["export", str(tmp_path / "b"), str(tmp_path / "hf")],
        ["import", str(tmp_path / "hf"), str(tmp_path / "c")],
        ["import", str(tmp_path / "hf"), str(tmp_path / "d"), "--dtype", "bf16"],
    )
    for words in steps:
        assert main(words) == 0, capsys.readouterr().err
    with Checkpoint(storage_at(job / "checkpoints"), "step_00000012") as wanted:
        for name, step in (("b", 12), ("c", 0)):
            with Checkpoint(
                storage_at(tmp_path / name / "checkpoints"), f"step_{step:08d}"
            ) as found:
                for key in wanted.tensors:
                    assert np.array_equal(found.whole(key), wanted.whole(key)), key
                assert {key.split("/")[0] for key in found.tensors} == {
                    "model",
                    "exp_avg",
                    "exp_avg_sq",
                }
                assert not found.whole("exp_avg/model.norm.weight").any()
        with Checkpoint(storage_at(tmp_path / "d" / "checkpoints"), "step_00000000") as found:
            for key, (dtype, shape) in wanted.tensors.items():
                assert found.tensors[key] == ("bfloat16", shape)
                master = key.replace("model/", "master/", 1)
                assert np.array_equal(found.whole(master), wanted.whole(key)) and dtype == "float32"


def test_import_refuses(job: Path, model: Path, tmp_path: Path, capsys: Said) -> None:
    for words, said in (
        ([str(model), str(job)], "has checkpoints already (newest: step 12)"),
        (
            [str(tmp_path), str(tmp_path / "new"), "--model", str(model)],
            "is neither a torch_dist checkpoint nor",
        ),
        ([str(tmp_path), str(tmp_path / "new")], "has no config.json"),
    ):
        assert main(["import", *words]) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_nothing_is_written_while_a_run_is_at_work(job: Path, model: Path) -> None:
    import os

    held = fence.hold(fence.lock_path(fence.control_dir(job), 2, 0))
    before = sorted((job / "checkpoints").iterdir())
    with pytest.raises(Busy, match=r"a run is at work here \(1 checkpoint agents\)"):
        commit(job, 20, sources_of(model))
    os.close(held)
    assert sorted((job / "checkpoints").iterdir()) == before


def test_short_sources_leave_no_draft(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="model/w: 4 bytes were given, its shape has 8"):
        commit(tmp_path, 1, [source("model/w", "float32", np.zeros(4, "u1"), (2,))])
    assert not list((tmp_path / "checkpoints").glob("step_*"))


def test_the_command(job: Path) -> None:
    code = "import sys; sys.argv[0] = 'rft'; from rft.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "ckpt", "ls", str(job)], capture_output=True, text=True
    )
    assert done.returncode == 0 and "step_00000012" in done.stdout
    done = subprocess.run(
        [sys.executable, "-c", code, "ckpt", "verify", "/nowhere"], capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr == "rft ckpt: /nowhere: no such directory\n"


def test_an_object_store_is_a_run_too(model: Path, tmp_path: Path, capsys: Said) -> None:
    where = f"memory://bucket/{tmp_path.name}"
    storage = open_storage(where)
    for step in (3, 12):
        single.write(
            storage, tmp_path / "control", step, sources_of(model), about={"model": str(model)}
        )
    assert main(["tag", f"{where}@3", "kept"]) == 0 and main(["ls", where]) == 0
    assert re.search(
        r"step_00000003\.\w+ +3 +1 +- +\S+ MB +1 rank +kept\n", capsys.readouterr().out
    )
    assert main(["verify", where]) == 0 and main(["diff", f"{where}@3", f"{where}@3"]) == 0
    assert main(["export", f"{where}/step_00000003.e0001n0000", str(tmp_path / "hf")]) == 0
    wanted = load_file(model / "model.safetensors")
    assert all(
        torch.equal(value, wanted[name])
        for name, value in load_file(tmp_path / "hf/model.safetensors").items()
    )
    assert main(["untag", f"{where}@3"]) == 0
    assert [entry.tagged for entry in list_entries(storage)] == [False, False]
