"""Every command of README and docs/*.md is run: its keys, files, tools and exit code are those that
a reader meets.

In: the shell blocks and transcripts of the pages. What a page leaves to the reader (a model, task
files, `...`) is put there by PLACES; a run is made small by `smaller`, which adds keys and changes
none that the page gives. A command that reads a run has the one that its page makes (MADE_BY); one
that serves is asked once and interrupted. Invariant: a command is run here, or ELSEWHERE names who
runs it, or why nobody can.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from rft.tools import studio
from rft.tools.toy import write_model
from tests.unit.test_docs_commands import PAGES, ROOT, commands

from runs import MODEL, Run, write_assets

TEST_S = 1200.0
RUN_S = 900.0  # a sweep of four runs
TRANSCRIPT = re.compile(r"^\$ (.*)$", re.MULTILINE)
NAMED_FILE = re.compile(r"```(?:python|yaml)\n(# ((?!rft/)[\w/]+\.(?:py|yaml))\n.*?)```", re.DOTALL)
NAMED_ROWS = re.compile(r"```jsonl (\w+)\n(.*?)```", re.DOTALL)
STARTS_A_RUN = re.compile(r"rft\.train\b|^rft train\b|launch/torchrun\.sh")

GRPO = "model.model_path=DIR buffer.explorer_input.taskset.path=FILE"
KEPT = (
    f"experiment=grpo name=kept trainer.checkpoint.versions=all {GRPO} "
    "'buffer.explorer_input.eval_tasksets=[{name: held_out, path: test.jsonl, "
    "format: {prompt_type: plaintext}}]'"
)
PLACES = (  # what a page leaves to the reader, and what is there
    (
        r"(?<=rft\.train) \.\.\. (mode=(?:serve|bench)) explorer\.version=\d+",
        rf" \1 explorer.version=2 {KEPT}",
    ),
    (r"runs/rft/demo(.*--version) 12", r"runs/rft/kept\1 2"),
    (r'^make quickstart(?: ARGS="(.*)")?$', r"python -m rft.train experiment=quickstart \1"),
    (r"^\.\.\. (?=.*taskset=null)", "python -m rft.train experiment=grpo model.model_path=DIR "),
    (r"^\.\.\.", f"python -m rft.train experiment=grpo {GRPO}"),
    (r"(experiment=grpo.*) \.\.\.", rf"\1 {GRPO}"),
    (r"experiment=(grpo|ppo)((?! model\.model_path).)*$", rf"\g<0> {GRPO}"),
    (r"/models/Qwen3-(?:0\.6|8)B|=DIR\b", lambda found: ("=" if "=" in found[0] else "") + "model"),
    (r"=FILE\b|=gsm8k\.jsonl", "=train.jsonl"),
    (r"^rft train ", "python -m rft.train "),
    (r"num_trials=20", "num_trials=2"),
)
MADE_BY = (  # what a command reads, and the command that makes it
    ("runs/rft/my_run", "python -m rft.train experiment=grpo name=my_run"),
    ("runs/rft/lr_and_seed/sweep", "python -m rft.train -m experiment=grpo name=lr_and_seed"),
    ("runs/rft/grid/sweep", "python -m rft.train -m experiment=sft name=grid"),
    ("out/torch_dist ", "rft ckpt export runs/rft/demo@20 out/torch_dist"),
    ("runs/rft/demo", "python -m rft.train experiment=sft name=demo"),
    ("name=offline", "python -m rft.train experiment=grpo name=rollouts"),
    (
        "name=collected mode=train",
        "python -m rft.train experiment=grpo name=collected mode=explore",
    ),
    ("runs/rft/quickstart_debug", "rft debug experiment=quickstart"),
    ("runs/rft/quickstart/rft", "python -m rft.train experiment=quickstart debug=fast"),
    ("sqlite:///shared.db", "python -m rft.train experiment=grpo name=shared"),
    ("runs/rft/kept", "python -m rft.train experiment=grpo name=kept"),
    ("name=kept", "python -m rft.train experiment=grpo name=kept"),
)
UNSAID = (  # runs that a page shows the checkpoints or experiences of, without the command
    "python -m rft.train experiment=sft name=demo model.model_path=DIR trainer.total_steps=20 "
    "trainer.save_interval=10 "
    "buffer.trainer_input.experience_buffer.path=FILE",
    "python -m rft.train experiment=grpo name=shared model.model_path=DIR "
    "buffer.explorer_input.taskset.path=FILE "
    "buffer.trainer_input.experience_buffer.storage_type=sql "
    "buffer.trainer_input.experience_buffer.path=sqlite:///$PWD/shared.db",
    f"python -m rft.train {KEPT}",
)
DIFFERS = re.compile(r"^rft ckpt diff ")  # its exit code says so
SERVES = re.compile(r"^rft (studio|view)|(experiment|mode)=serve")  # until it is interrupted
UNDER_WAY = re.compile(r"^rft engines ")  # of the run of two engines in docs/quickstart.md
ELSEWHERE = (  # command, who runs it or why it cannot be run here
    (
        r"^make (setup|lint|verify|env-gym)$|^make setup DEVICE=cpu$",
        "tests: what `make verify`, which runs this test, is or does first",
    ),
    (r"^rft init my_first$", "tests/unit/test_init.py: it asks five questions on a terminal"),
    (r"^make (docs|release)$", "tests/verify/test_docs_site.py tests/verify/test_release.py"),
    (r"^make test", "tests: the suite that this test belongs to, or a part of it"),
    (r"^make bench$|-m bench\.", "bench: minutes to hours, and a quiet machine"),
    (r"^make gpu$", "tests/gpu_model/test_first_hour.py"),
    (r"^(PIP_NO_INDEX=1 )?make demo$", "tests/verify/test_demo_seeds.py"),
    (r"^make verify PART=drill$", "tests/verify/test_silent_faults.py"),
    (r"runs/rft/toy", "tests/unit/test_versions.py"),
    (
        r"--verl algorithm\.adv_estimator=grpo data\.train_files=\$HOME",
        "tests/unit/test_docs_commands.py: it is for eight GPUs",
    ),
    (r"^make quickstart( DEVICE=cpu)?$", "tests/verify/test_quickstart.py"),
    (
        r"^pip install |-m pip wheel |DEVICE=cuda$|^\. \.venv|^apt-get |^docker ",
        "tests/verify/test_installed.py tests/unit/test_install.py: what it takes; no "
        "set for cards is installed here",
    ),
    (r"^nsys ", "tests/unit/test_profiler.py: the rest wants an NVIDIA GPU"),
    (r"launch/slurm(_sweep)?\.sh|^scancel |^cat rft-2\.log", "tests/verify/test_slurm.py"),
    (r"^cat > trials|^algorithm\.|^END$", "tests/verify/test_slurm.py"),
    (r"NNODES=2 ", "tests/verify/test_torchrun_nodes.py"),
    (r"launch/ray\.sh|^export NCCL_", "tests/verify/test_ray_launch.py"),
    (r"^rft plan .*--cards", "tests/unit/test_planner.py"),
    (r" size=", "tests/unit/test_sizes.py: they are for GPUs of 80 GB"),
    (r"speculative_config=", "tests/e2e/test_speculation.py: refused on a CPU, as the page says"),
    (r"^rft doctor cluster\.ray_address", "tests/unit/test_machine_rules.py"),
    (r"launch/ray_job\.sh|^ray job stop", "tests/verify/test_ray_launch.py"),
    (
        r"^kubectl ",
        "tests/verify/test_kubernetes.py: no cluster here, the files and their scripts are checked",
    ),
    (r"monitor=mlflow", "tests/verify/test_mlflow.py"),
    (
        r"monitor_args\.mode=online",
        "tests/unit/test_services.py: offline, for online wants W&B's service",
    ),
    (
        r"storage=s3:",
        (
            "tests/e2e/test_sync_methods.py tests/unit/test_ckpt_objects.py: the two halves, "
            "without "
            "S3 between"
        ),
    ),
    (r"^kill -9 ", "tests/e2e/test_pool.py"),
    (
        r"experiment=tinker|^export TINKER_API_KEY|tinker_service\.py",
        "tests/e2e/test_tinker_run.py",
    ),
    (r"postgresql://", "tests/unit/test_postgres.py tests/e2e/test_sql_run.py"),
)


def lines() -> list[tuple[str, str]]:
    """(page, command) of the pages, each once, without comments."""
    found = commands()
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        found += [(page.name, line) for line in TRANSCRIPT.findall(text)]
    plain = [(page, " ".join(re.sub(r"\s#\s.*$", "", line).split())) for page, line in found]
    return list(dict.fromkeys(plain))


def elsewhere(line: str) -> str | None:
    return next((who for pattern, who in ELSEWHERE if re.search(pattern, line)), None)


def completed(line: str) -> str:
    """The command with what the page leaves to the reader."""
    for pattern, there in PLACES:
        line = re.sub(pattern, there, line).strip()
    return (
        f"{line} {' '.join(smaller(line))}".strip()
        if STARTS_A_RUN.search(line) or "rft doctor e" in line
        else line
    )


def smaller(line: str) -> list[str]:
    """Keys that make it a matter of seconds on two cores; never one that the command gives."""
    keys = ["device=cpu", "explorer.rollout_model.kv_cache_gb=0.25"]
    if "experiment=quickstart" in line:
        keys = ["debug=fast"]
    elif "--config run.yaml" in line:
        keys += ["trainer.total_steps=10"]
    elif "experiment=serve" in line:
        keys += ["model.max_prompt_tokens=16", "model.max_response_tokens=16"]
    elif found := re.search(r"experiment=(sft|dpo)", line):
        sized = "buffer.train_batch_size=8" if found[1] == "sft" else "buffer.batch_size=4"
        keys += ["trainer.total_steps=3", sized, "buffer.total_epochs=1000"]
    else:
        said = 1400 if "tool_use" in line else 16  # what tells of the tools is the prompt
        tasks = 32 if "ppo_mini_batch_size=64" in line else 4  # times two, as many as that
        keys += ["trainer.total_steps=3", "buffer.total_epochs=1000", f"buffer.batch_size={tasks}"]
        keys += ["trainer.max_token_len_per_gpu=8192", "model.max_response_tokens=16"]
        keys += [f"model.max_prompt_tokens={said}"]
        keys += [] if "--config" in line else ["algorithm.repeat_times=2"]
        keys += ["trainer.critic_warmup=1"] if "experiment=ppo" in line else []
    given = {word.partition("=")[0] for word in shlex.split(line)}
    return [key for key in keys if key.partition("=")[0] not in given]


MINE = [
    (page, line) for page, line in lines() if not elsewhere(line) and not UNDER_WAY.search(line)
]
HERE = [(page, line) for page, line in MINE if not SERVES.search(line)]
SERVERS = [(page, line) for page, line in MINE if SERVES.search(line)]


def write_what_pages_name(shared: Path) -> None:
    """A model, task files, the files that pages give the text of, and what the studio makes."""
    write_assets(shared)
    (shared / "model").rename(shared / "small")
    write_model(shared / "model", context=2048, **MODEL)
    for name in ("gsm8k.jsonl", "rows.jsonl", "easy.jsonl", "hard.jsonl"):
        (shared / name).symlink_to("train.jsonl")
    (shared / "test.jsonl").symlink_to("eval.jsonl")
    (shared / "run.yaml").symlink_to(ROOT / "tests" / "unit" / "flat" / "both.yaml")
    for name in ("launch", ".venv-env-gym"):
        (shared / name).symlink_to(ROOT / name)
    (shared / "assets").symlink_to(".")
    for page in PAGES:
        for text, name in NAMED_FILE.findall(page.read_text(encoding="utf-8")):
            (shared / name).parent.mkdir(exist_ok=True)
            (shared / name).write_text(
                text.replace("/models/Qwen3-0.6B", "model"), encoding="utf-8"
            )
    rows = dict(NAMED_ROWS.findall((ROOT / "docs" / "data.md").read_text(encoding="utf-8")))
    (shared / "pairs.jsonl").write_text(rows["text_pairs"] * 8, encoding="utf-8")
    (shared / "text.jsonl").write_text(rows["text"] * 8, encoding="utf-8")
    mine = {
        "model.model_path": shared / "model",
        "buffer.explorer_input.taskset.path": shared / "train.jsonl",
    }
    made = studio.examine(
        "grpo", {"device": "cpu", **{key: str(path) for key, path in mine.items()}}
    )
    assert made["ready"], made["problems"]
    (shared / "gsm8k.yaml").write_text(made["yaml"], encoding="utf-8")


def run_here(test: Any) -> Any:
    """For `make verify`: it starts whole runs."""
    return pytest.mark.verify(pytest.mark.timeout(TEST_S)(test))


class Desk:
    """Runs a completed command once, in a directory of its own or in that of the command that made
    what it reads.
    """

    def __init__(self, factory: pytest.TempPathFactory):
        self.factory = factory
        self.done: dict[str, tuple[Path, str]] = {}
        self.shared = factory.mktemp("shared")
        write_what_pages_name(self.shared)

    def perform(self, line: str) -> tuple[Path, str]:
        """Where it ran, and what it printed."""
        if line not in self.done:
            place = self.place(line)
            self.done[line] = place, call(line, place)
        return self.done[line]

    def place(self, line: str) -> Path:
        for made, by in MADE_BY:
            if made in line and by not in line:
                known = [*(line for _, line in lines()), *UNSAID]
                (maker,) = {completed(one) for one in known if completed(one).startswith(by)}
                return self.perform(maker)[0]
        place = self.factory.mktemp("command")
        for path in self.shared.iterdir():
            (place / path.name).symlink_to(path)
        return place


@pytest.fixture(scope="session")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    return Desk(tmp_path_factory)


def environment(place: Path) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    flat = {"FLAT_ROOT": "runs", "FLAT_MODEL": str(place / "small"), "FLAT_DATA": str(place)}
    return {**os.environ, **flat, "PATH": path, "PYTHONPATH": f"{ROOT}:{place}"}


def call(line: str, place: Path) -> str:
    command = ["bash", "-c", line]
    ended = subprocess.run(
        command, cwd=place, env=environment(place), capture_output=True, text=True, timeout=RUN_S
    )
    assert ended.returncode == (1 if DIFFERS.search(line) else 0), (
        f"{line}\n{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"
    )
    return ended.stdout


def started(line: str, place: Path) -> Run:
    variables = " ".join(f"{name}={environment(place)[name]}" for name in ("PATH", "PYTHONPATH"))
    return Run(["bash", "-c", f"cd {place} && exec env {variables} {line}"])


def test_every_command_has_a_place() -> None:
    """One that is run, and nothing that only looks so: what is run elsewhere names a file, and no
    pattern has gone stale.
    """
    assert len(HERE) > 30
    for pattern, who in ELSEWHERE:
        assert any(re.search(pattern, line) for _, line in lines()), (
            f"{pattern}: no page says so any more"
        )
        assert all((ROOT / path).exists() for path in who.partition(":")[0].split()), who
    for _, line in MINE:
        assert "..." not in completed(line) and "DIR" not in completed(line), completed(line)
        assert re.match(r"python -m rft|rft |torchrun |\w+=\S+ launch/", completed(line)), line


@run_here
@pytest.mark.parametrize(("page", "line"), HERE, ids=[f"{page}: {line}" for page, line in HERE])
def test_it_runs(desk: Desk, page: str, line: str) -> None:
    place, printed = desk.perform(completed(line))
    assert printed.strip(), "it said nothing"
    if STARTS_A_RUN.search(line) and "mode=explore" not in line:
        assert any("loss" in path.read_text() for path in place.rglob("metrics.jsonl")), (
            "no step was trained"
        )


@run_here
@pytest.mark.parametrize(
    ("page", "line"), SERVERS, ids=[f"{page}: {line}" for page, line in SERVERS]
)
def test_it_serves(desk: Desk, page: str, line: str) -> None:
    """It says where, with its key if it wants one, answers there, and ends when it is
    interrupted.
    """
    place = desk.place(completed(line))
    with started(completed(line), place) as run:
        found = run.wait_for(r"(http://127\.0\.0\.1:\d+)[^\s;]*")
        asked = f"{found[1]}/health" if "serve" in line else found[0]
        with urllib.request.urlopen(asked, timeout=60) as answer:
            assert answer.status == 200
        run.process.send_signal(signal.SIGINT)
        assert (run.end(), "Traceback" in run.errors()) == (0, False), run.errors()


@run_here
def test_commands_of_a_run_under_way(tmp_path: Path) -> None:
    """`rft engines` of all pages, in their order, against the run of
    docs/quickstart.md with two engines.
    """
    (start,) = (line for page, line in HERE if "engine_num=2" in line and page == "quickstart.md")
    asked = [line for _, line in lines() if UNDER_WAY.search(line)]
    assert len(asked) >= 4
    endless = "stages.0.trainer.total_steps=2 stages.1.trainer.total_steps=100000"
    with started(completed(start).replace("debug=fast", endless), tmp_path) as run:
        run.wait_step(2)
        run.wait_for("1 trainer rank.*engine")
        run.wait_step(2)
        for line in asked:
            printed = call(line.replace("runs/rft/quickstart", "runs/rft/two"), tmp_path)
            assert "engine_" in printed
        run.process.send_signal(signal.SIGTERM)
        assert run.end() == 128 + signal.SIGTERM
