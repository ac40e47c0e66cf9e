"""Writes runs.tar.xz: runs as they lay on disk when they were killed. `python -m
tests.recorded.make_runs`, run at 8c2d7f2.

In: the command lines below. Out: an archive of what they left, without their logs, and in it
`reads.json`: what rft's tools read there. The model is so small that everything together has less
than 1 MiB. The commands run inside of the directory that they write to and name no other, for much
of what they leave is sealed by hashes; `@ROOT@` stands for it in what is not. `test_runs.py` goes
on from it.
"""

import hashlib
import io
import json
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from safetensors import safe_open

from tests.e2e.runs import REPOSITORY, Run, checkpoints
from tests.recorded import entry

HERE = Path(__file__).parent
ARCHIVE, READS = HERE / "runs.tar.xz", "reads.json"
LARGEST = 2**20
PLACE = b"@ROOT@"
BUFFER = "buffer.trainer_input.experience_buffer"
COMMON = [
    "checkpoint_root_dir=runs",
    "device=cpu",
    "monitor=none",
    "model.model_path=model",
    "model.max_prompt_tokens=16",
    "model.max_response_tokens=8",
    "trainer.max_checkpoints_to_keep=1",
    "trainer.save_hf_checkpoint=never",
]
LOOP_STEPS, LOOP_SAVES = 12, 4
LOOP = [
    "experiment=grpo",
    *COMMON,
    "buffer.explorer_input.taskset.path=train.jsonl",
    "algorithm.repeat_times=2",
    "buffer.batch_size=2",
    "buffer.explorer_input.default_reward_fn_type=letters.py:reward",
    "explorer.rollout_model.kv_cache_gb=0.25",
    "algorithm.optimizer.lr=1e-4",
    f"trainer.total_steps={LOOP_STEPS}",
    f"trainer.save_interval={LOOP_SAVES}",
]
ROW_STEPS, ROW_SAVES = 200, 20
ROWS = [
    "experiment=sft",
    *COMMON,
    f"{BUFFER}.path=train.jsonl",
    "buffer.train_batch_size=16",
    "buffer.total_epochs=1000",
    f"trainer.total_steps={ROW_STEPS}",
    f"trainer.save_interval={ROW_SAVES}",
]
COMMANDS = {
    "journal": [*LOOP, "name=journal"],
    "sql": [*LOOP, "name=sql", f"{BUFFER}.storage_type=sql", f"{BUFFER}.path=sqlite:///buffer.db"],
    "tp2": [*ROWS, "name=tp2", "trainer.megatron.tensor_model_parallel_size=2"],
    "grid": [
        "-m",
        *ROWS,
        "name=grid",
        "algorithm.optimizer.optimizer_type=sgd",
        "sweep.objective=loss",
        "sweep.direction=minimize",
        "algorithm.optimizer.lr=1e-3,1e-4",
    ],
}
JOBS = {
    "journal": "runs/rft/journal",
    "sql": "runs/rft/sql",
    "tp2": "runs/rft/tp2",
    "grid": "runs/rft/grid/sweep/1",
}


def train(name: str, root: Path) -> Run:
    """The recorded command, in that directory: what it leaves does not name the place, for much of
    it is sealed by hashes.
    """
    return Run(["env", f"--chdir={root}", sys.executable, "-m", "rft.train", *COMMANDS[name]])


def killed(name: str, root: Path) -> None:
    """Run it until its job has a checkpoint and has gone on from there."""
    job = root / JOBS[name]
    with train(name, root) as run:
        if name == "grid":
            run.wait_for("^sweep: trial 1, attempt 1: ")
        while not checkpoints(job):
            assert run.wait_step(1) < run_steps(name)
        run.wait_step(checkpoints(job)[-1] + 1)
        run.kill_everything()
    assert checkpoints(job)[-1] < run_steps(name)


def run_steps(name: str) -> int:
    return LOOP_STEPS if name in ("journal", "sql") else ROW_STEPS


def is_part(path: Path) -> bool:
    """Of the archive: what a run is made of and tools read, and not
    what it told, nor what SQLite makes anew.
    """
    if not path.is_file() or "logs" in path.parts and path.parent.name != "trace":
        return False
    return path.name not in ("supervisor.log", "multirun.yaml", "buffer.db-shm", "letters.py")


def pack(root: Path) -> None:
    with tarfile.open(ARCHIVE, mode="w:xz", preset=9) as archive:
        for path in sorted(filter(is_part, root.rglob("*"))):
            inner, content = path.relative_to(root), path.read_bytes()
            if path.name == "result.json":
                content = content.replace(str(root).encode(), PLACE)
            assert not any(str(place).encode() in content for place in (root, REPOSITORY)), (
                f"{inner} names a place"
            )
            member = tarfile.TarInfo(str(inner))
            member.size, member.mode = len(content), path.stat().st_mode & 0o777
            archive.addfile(member, io.BytesIO(content))
    assert ARCHIVE.stat().st_size <= LARGEST, f"{ARCHIVE} has {ARCHIVE.stat().st_size} bytes"


def unpack(root: Path) -> None:
    """Everything is there again for the recorded commands; the
    reward is that of the tests of today.
    """
    shutil.unpack_archive(ARCHIVE, root)
    for path in root.rglob("result.json"):
        path.write_bytes(path.read_bytes().replace(PLACE, str(root).encode()))
    shutil.copy(REPOSITORY / "tests" / "e2e" / "letters.py", root)


def reads(root: Path) -> dict[str, Any]:
    """What the tools find: the tensors of every checkpoint, by hash,
    and the experiences of both buffers.
    """
    return {
        "tensors": {
            name: tensors(root / job, root / "exported" / name) for name, job in JOBS.items()
        },
        "experiences": {
            "journal": dumped(str(root / JOBS["journal"]), root / "journal.jsonl"),
            "sql": dumped(f"sqlite:///{root / 'buffer.db'}", root / "sql.jsonl"),
        },
    }


def tensors(job: Path, target: Path) -> dict[str, str]:
    assert entry.command("ckpt", "verify", str(job)) == 0
    assert (
        entry.command(
            "ckpt", "export", str(job), str(target), "--model", str(target.parents[1] / "model")
        )
        == 0
    )
    with safe_open(target / "model.safetensors", "np") as file:
        return {
            name: hashlib.sha256(file.get_tensor(name).tobytes()).hexdigest()
            for name in file.keys()  # noqa: SIM118  no dictionary
        }


def dumped(source: str, target: Path) -> list[Any]:
    assert entry.command("buffer", "dump", source, "-o", str(target)) == 0
    return [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="rft-recorded-") as directory:
        root, again = Path(directory) / "made", Path(directory) / "again"
        entry.write_model(
            root / "model",
            hidden=16,
            layers=1,
            heads=2,
            kv_heads=2,
            head_dim=32,
            ffn=32,
            context=64,
        )
        entry.write_arithmetic(root, digits=1, num_eval=16)
        shutil.copy(REPOSITORY / "tests" / "e2e" / "letters.py", root)
        for name in COMMANDS:
            killed(name, root)
        pack(root)
        unpack(again)
        (root / READS).write_text(json.dumps(reads(again)), encoding="utf-8")
        pack(root)


if __name__ == "__main__":
    main()
