"""The task pipeline with its real worker processes: from raw files to the rows that a stage reads,
whole or not at all.
"""

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from rft import preflight
from rft.config import Config, ConfigError
from rft.extras.pipeline import data_juicer, tasks
from rft.extras.pipeline.output import digest
from rft.extras.pipeline.task_operators import LLMDifficulty, PassRateFilter
from rft.extras.pipeline.tasks import TaskPipelineFailed, segments
from rft.run import stages
from rft.run.stages import StageFailed
from tests.unit.test_config import grpo
from tests.unit.test_data_juicer import SERVER, url
from tests.unit.test_refusals import split

KEY = "data_processor.task_pipeline"
TASKSET = "buffer.explorer_input.taskset"
ODD = Path(__file__).with_name("odd_operators.py")
__all__ = ["url"]  # the fixture


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """200 sums; every fourth is one that was there before, number 7 has no answer."""
    found = []
    for number in range(200):
        same = number - 1 if number % 4 == 3 else number
        found.append(
            {
                "prompt": f"{same} + 1",
                "response": str(same + 1),
                "number": number,
                "hard": (number * 37) % 101,
            }
        )
    found[8]["response"] = ""
    return write(tmp_path / "raw.jsonl", found)


def configured(assets: Path, tmp_path: Path, raw: Path, operators: list[Any], *more: str) -> Config:
    """A grpo stage that reads what the operators make of `raw`."""
    told = json.dumps(operators).replace('"', "")
    (config,) = grpo(
        assets,
        tmp_path / "runs",
        f"{KEY}.inputs=[{raw}]",
        f"{KEY}.operators={told}",
        f"{TASKSET}.path={tmp_path / 'made.jsonl'}",
        f"{KEY}.num_process=2",
        "buffer.batch_size=4",
        f"{TASKSET}.shuffle=false",
        *more,
    )
    return config


def op(name: str, **args: Any) -> dict[str, Any]:
    return {"name": name, "args": args}


def test_answers_of_a_csv_stay_as_they_are_written(assets: Path, tmp_path: Path) -> None:
    path = tmp_path / "raw.csv"
    lines = ["prompt,response,hard", *(f"{n},00{n},{n}" for n in range(8))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    operators = [op("difficulty_filter", field="hard", max_value=5)]
    config = configured(assets, tmp_path, path, operators)
    assert stages.ready([config], 0, preflight.check) is config
    made = rows_of(tmp_path / "made.jsonl")
    assert [row["response"] for row in made] == [f"00{n}" for n in range(6)]


def test_rows_go_through_the_operators_in_order_and_become_the_taskset(
    assets: Path, tmp_path: Path, raw: Path
) -> None:
    """Rows J4 to J8: several processes, operators that need all rows, target fields, and the steps
    that follow from the result.
    """
    operators = [
        op("required_fields", fields=["prompt", "response"]),
        op("length_filter", field="prompt", max_length=6),
        op("dedupe", fields=["prompt"]),
        op("difficulty_filter", field="hard", max_value=80),
        op("difficulty_curriculum", field="hard"),
    ]
    config = configured(
        assets, tmp_path, raw, operators, f"{KEY}.target_fields=[prompt,response,hard]"
    )
    assert config.trainer.total_steps is None, "nobody knows yet how many rows there will be"
    assert stages.ready([config], 0, preflight.check) is config
    made = rows_of(tmp_path / "made.jsonl")
    source = rows_of(raw)
    expected = [
        row
        for row in source
        if row["response"]
        and row["number"] % 4 != 3
        and row["hard"] <= 80
        and len(row["prompt"]) <= 6
    ]
    expected.sort(key=lambda row: row["hard"])
    assert made == [
        {name: row[name] for name in ("prompt", "response", "hard")} for row in expected
    ]
    assert config.trainer.total_steps == len(made) // 4
    note = json.loads((tmp_path / "made.jsonl.pipeline.json").read_text())
    assert (note["rows_in"], note["rows_out"]) == (200, len(made))
    behind = {
        "required_fields": 199,
        "length_filter": 99,
        "dedupe": 74,
        "difficulty_filter": len(made),
    }
    assert dict(note["operators"]) == behind | {"difficulty_curriculum": len(made)}
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [
        "made.jsonl",
        "made.jsonl.pipeline.json",
        "raw.jsonl",
    ], "nothing is left half made"


def test_what_was_made_is_used_again_and_nothing_else_is_overwritten(
    assets: Path, tmp_path: Path, raw: Path
) -> None:
    operators = [op("required_fields", fields=["response"])]
    stages.ready([configured(assets, tmp_path, raw, operators)], 0, preflight.check)
    made = tmp_path / "made.jsonl"
    before = made.stat()
    # which changes nothing of the result
    config = configured(assets, tmp_path, raw, operators, f"{KEY}.num_process=3")
    assert config.trainer.total_steps == 199 // 4, "known at once: the rows are there"
    stages.ready([config], 0, preflight.check)
    assert made.stat().st_mtime_ns == before.st_mtime_ns and made.stat().st_ino == before.st_ino
    for change in (
        lambda: operators.append(op("dedupe", fields=["prompt"])),
        lambda: write(raw, rows_of(raw)[:50]),
    ):
        change()
        with pytest.raises(
            ConfigError,
            match=rf"{KEY}.output.path: .*made.jsonl was made by a pipeline of other inputs",
        ):
            configured(assets, tmp_path, raw, operators)
    (tmp_path / "made.jsonl.pipeline.json").unlink()
    with pytest.raises(ConfigError, match=r"made.jsonl already exists, and is not overwritten"):
        configured(assets, tmp_path, raw, operators)


def test_the_output_may_be_a_directory_or_have_a_key_of_its_own(
    assets: Path, tmp_path: Path, raw: Path
) -> None:
    operators = [op("required_fields", fields=["prompt"])]
    config = configured(
        assets,
        tmp_path,
        raw,
        operators,
        f"{KEY}.output.path={tmp_path / 'rows'}",
        f"{KEY}.top_k=40",
    )
    stages.ready([config], 0, preflight.check)
    assert config.buffer.explorer_input.taskset is not None
    assert (
        config.buffer.explorer_input.taskset.path == str(tmp_path / "rows")
        and config.trainer.total_steps == 10
    )
    assert len(rows_of(tmp_path / "rows" / "output.jsonl")) == 40


def test_supervised_rows_are_made_in_mode_train(assets: Path, tmp_path: Path, raw: Path) -> None:
    rows = "buffer.trainer_input.experience_buffer"
    config = configured(
        assets,
        tmp_path,
        raw,
        [op("required_fields", fields=["response"])],
        "mode=train",
        "algorithm.algorithm_type=sft",
        "algorithm.repeat_times=null",
        f"{rows}.storage_type=file",
        f"{rows}.path={tmp_path / 'sft.jsonl'}",
        f"{rows}.format.prompt_type=plaintext",
        "buffer.train_batch_size=10",
        f"{rows}.shuffle=false",
    )
    stages.ready([config], 0, preflight.check)
    assert len(rows_of(tmp_path / "sft.jsonl")) == 199 and config.trainer.total_steps == 19


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("raises", "Does: rows 0 to 63: KeyError: 'answer'"),
        ("hangs", "Does: rows 0 to 63: ran longer than 2 s and was killed"),
        ("dies", "its process exited with code 9"),
        ("no_items", "1 among its items, which is no dict"),
        ("drops", "of 200 rows it left 0, and one step takes 4"),
    ],
)
def test_a_failing_operator_ends_it_and_leaves_no_output(
    assets: Path, tmp_path: Path, raw: Path, what: str, said: str
) -> None:
    seconds = 2 if what == "hangs" else 60
    config = configured(
        assets,
        tmp_path,
        raw,
        [op(f"{ODD}:Does", what=what, always=True)],
        f"{KEY}.timeout={seconds}",
        f"{KEY}.num_process=1",
    )
    with pytest.raises(StageFailed) as failed:
        stages.ready([config], 0, preflight.check)
    assert (
        "task pipeline failed" in str(failed.value)
        and said in str(failed.value)
        and failed.value.code == 1
    )
    assert not (tmp_path / "made.jsonl").exists() and no_workers()


def no_workers() -> bool:
    """Whether this process has no worker of a pipeline left.

    What another test has left may have ended, and wait to be reaped.
    """
    alive = (
        one
        for one in psutil.Process().children(recursive=True)
        if one.status() != psutil.STATUS_ZOMBIE
    )
    return not any("rft.extras.pipeline.worker" in " ".join(child.cmdline()) for child in alive)


def test_a_signal_ends_it(assets: Path, tmp_path: Path, raw: Path) -> None:
    mark = tmp_path / "pid"
    config = configured(
        assets, tmp_path, raw, [op(f"{ODD}:Does", what="hangs", mark=str(mark), always=True)]
    )

    def interrupt() -> None:
        while not mark.exists():
            threading.Event().wait(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    heard = []
    before = signal.signal(signal.SIGINT, lambda *_: heard.append(1))
    try:
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(TaskPipelineFailed, match="stopped by SIGINT") as stopped:
            tasks.run(config, print)
        thread.join()
        os.kill(os.getpid(), signal.SIGINT)
        assert stopped.value.code == 130 and heard == [1], "whoever listened before listens again"
    finally:
        signal.signal(signal.SIGINT, before)
    assert no_workers() and not (tmp_path / "made.jsonl").exists()


def test_operators_that_need_all_rows_stand_alone() -> None:
    assert segments([False, False, True, False, True, True]) == [[0, 1], [2], [3], [4], [5]]


def test_pass_rates_of_an_earlier_run_choose_tasks(assets: Path, tmp_path: Path, raw: Path) -> None:
    from rft.extras.pipeline.output import GroupRecorder
    from rft.ground.experience import Experience

    recorder = GroupRecorder(str(tmp_path / "seen.jsonl"))
    for number, rewards in ((0, (0.0, 0.0)), (1, (0.0, 1.0)), (2, (1.0, 1.0))):
        made = [
            Experience(tokens=[1, 2], prompt_length=1, action_mask=[1], logprobs=[0.0], reward=r)
            for r in rewards
        ]
        recorder.write(number, f"{number} + 1", made)
    operators = [
        op(
            "pass_rate_filter",
            samples=str(tmp_path / "seen.jsonl"),
            min_rate=0.1,
            max_rate=0.9,
            keep_unseen=False,
        )
    ]
    with pytest.raises(StageFailed, match="it left 1, and one step takes 4"):
        stages.ready([configured(assets, tmp_path, raw, operators)], 0, preflight.check)
    stages.ready(
        [configured(assets, tmp_path, raw, operators, "buffer.batch_size=1")], 0, preflight.check
    )
    assert [(row["prompt"], row["pass_rate"]) for row in rows_of(tmp_path / "made.jsonl")] == [
        ("1 + 1", 0.5)
    ]


def rates(path: Path) -> dict[str, float]:
    operator = PassRateFilter(str(path))
    asyncio.run(operator.prepare())
    return operator.rates


def test_pass_rates_are_those_of_responses_that_were_judged_each_once(tmp_path: Path) -> None:
    path = tmp_path / "seen.jsonl"
    right, wrong = {"reward": 1.0, "reward_outcome": "ok"}, {"reward_outcome": "ok"}
    failed = {"reward": 0.0, "reward_outcome": "error"}
    groups = [
        {"group": 1, "prompt": "a ", "experiences": [right, wrong]},
        {"group": 2, "prompt": "b", "experiences": [right, failed, {"reward": None}]},
        {"group": 1, "prompt": "a ", "experiences": [right, right]},  # again after a crash
        {"group": 1, "prompt": "of another run", "experiences": [wrong]},
        {"prompt": [{"role": "user", "content": "c"}], "reward": 0.25},
    ]
    whole = "".join(json.dumps(one) + "\n" for one in groups)
    path.write_text(whole + "\n" + whole[: len(whole) // 2].rpartition("\n")[2])
    assert rates(path) == {"a": 1.0, "b": 1.0, "of another run": 0.0, "c": 0.25}
    for damage in ("[1]", "{", '{"prompt": "x"}', '{"prompt": "x", "reward": null}'):
        path.write_text(f"\n{damage}\n" + whole)
        with pytest.raises(ValueError, match=r"seen.jsonl line 2 is no prompt with a reward"):
            rates(path)


def test_another_file_behind_an_argument_is_another_pipeline(
    assets: Path, tmp_path: Path, raw: Path
) -> None:
    samples = tmp_path / "seen.jsonl"
    samples.write_text('{"prompt": "a", "reward": 1}\n')
    config = configured(assets, tmp_path, raw, [op("pass_rate_filter", samples=str(samples))])
    before = digest(config)
    assert digest(config) == before
    samples.write_text('{"prompt": "a", "reward": 0}\n')
    assert digest(config) != before


class Judge(BaseHTTPRequestHandler):
    """An OpenAI-compatible endpoint: the last digit of a task decides, the first answer to each is
    no JSON; 5 is never judged.
    """

    asked: dict[str, int] = {}
    keys: set[str | None] = set()

    def do_POST(self) -> None:
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        task = question["messages"][0]["content"].rpartition("Question: ")[2]
        Judge.keys.add(self.headers["Authorization"])
        Judge.asked[task] = Judge.asked.get(task, 0) + 1
        said = (
            "I think it is hard."
            if Judge.asked[task] == 1 or "5 + 1" in task
            else json.dumps({"difficulty": 1 + int(task[0]) % 5})
        )
        body = json.dumps(
            {"choices": [{"message": {"role": "assistant", "content": said}}]}
        ).encode()
        self.send_response(200 if self.path == "/v1/chat/completions" else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    Judge.asked, Judge.keys = {}, set()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{server.server_port}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "secret-of-the-judge")
    yield server.server_name
    server.shutdown()
    server.server_close()


def test_a_busy_server_is_asked_again_later_and_half_numbers_are_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def said(words: str) -> httpx.Response:
        return httpx.Response(200, json={"choices": [{"message": {"content": words}}]})

    def lost(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    answers = [
        httpx.Response(429, headers={"Retry-After": "7"}),
        httpx.Response(503),
        lost,
        said('{"difficulty": 3.5}'),
        said('{"difficulty": 45}'),
        httpx.Response(404),
        said('{"difficulty": 4.0}'),
    ]
    pauses = []

    async def noted(seconds: float) -> None:
        pauses.append(seconds)

    def handle(request: httpx.Request) -> httpx.Response:
        answer = answers.pop(0)
        return answer(request) if callable(answer) else answer

    async def scored() -> float:
        operator = LLMDifficulty("judge", ["q"], api_endpoint="http://judge", retries=6)
        await operator.prepare()
        monkeypatch.setattr(asyncio, "sleep", noted)
        async with httpx.AsyncClient(transport=httpx.MockTransport(handle)) as operator.client:
            return await operator._score({"q": "1 + 1"})

    assert asyncio.run(scored()) == 0.8 and pauses == [7.0, 2.0, 4.0] and not answers


def test_a_language_model_scores_difficulty(assets: Path, tmp_path: Path, judge: str) -> None:
    """As the reference's example has it; keys of the environment reach the endpoint and no file."""
    scored = op(
        "llm_difficulty_score_filter",
        api_or_hf_model="judge",
        min_score=0.5,
        input_keys=["prompt"],
        field_names=["Question"],
    )
    raw = write(
        tmp_path / "raw.jsonl",
        [{"prompt": f"{n} + 1", "response": "x"} for n in (4, 0, 3, 2, 9, 1, 7, 6)],
    )
    config = configured(assets, tmp_path, raw, [scored, op("difficulty_curriculum")])
    stages.ready([config], 0, preflight.check)
    made = [
        (row["prompt"][0], row["llm_difficulty_score"]) for row in rows_of(tmp_path / "made.jsonl")
    ]
    assert made == [("2", 0.6), ("7", 0.6), ("3", 0.8), ("4", 1.0), ("9", 1.0)], "easy to hard"
    assert set(Judge.asked.values()) == {2} and Judge.keys == {"Bearer secret-of-the-judge"}
    assert not any(
        "secret-of" in path.read_text(errors="ignore")
        for path in tmp_path.rglob("*")
        if path.is_file()
    )
    write(raw, [{"prompt": "5 + 1", "response": "6"}])
    (tmp_path / "made.jsonl").unlink()
    with pytest.raises(
        StageFailed,
        match=r"rows 0 to 0: .*gave no difficulty in 4 tries; last: 'I think it is hard.'",
    ):
        stages.ready(
            [configured(assets, tmp_path, raw, [scored], "buffer.batch_size=1")], 0, preflight.check
        )


def test_operators_of_data_juicer_are_its_services(
    assets: Path, tmp_path: Path, raw: Path, url: str
) -> None:  # noqa: F811
    operators = [op("shorter_than", field="prompt", length=6)]
    config = configured(
        assets,
        tmp_path,
        raw,
        operators,
        f"service.data_juicer.server_url={url}",
        f"{KEY}.target_fields=[prompt,response]",
    )
    stages.ready([config], 0, preflight.check)
    made = rows_of(tmp_path / "made.jsonl")
    note = json.loads((tmp_path / "made.jsonl.pipeline.json").read_text())
    assert (note["rows_in"], note["operators"]) == (200, [["data_juicer", len(made)]])
    assert len(made) == sum(len(row["prompt"]) < 6 for row in rows_of(raw)) and set(made[0]) == {
        "prompt",
        "response",
    }
    assert int(made[0]["prompt"].split()[0]) > int(made[-1]["prompt"].split()[0]), (
        "in the order of the service"
    )
    assert [path.name for path in tmp_path.glob(".*")] == [], "its directory is gone"
    with pytest.raises(
        StageFailed, match=r"/process_task answered 500: ValueError: no operator mean"
    ):
        stages.ready(
            [
                configured(
                    assets,
                    tmp_path,
                    raw,
                    [op("mean")],
                    f"service.data_juicer.server_url={url}",
                    f"{KEY}.output.path={tmp_path / 'other.jsonl'}",
                )
            ],
            0,
            preflight.check,
        )


def test_it_starts_the_service_itself(assets: Path, tmp_path: Path, raw: Path) -> None:
    command = f"'{{python}} {SERVER} --port {{port}}'"
    config = configured(
        assets,
        tmp_path,
        raw,
        [op("shorter_than", field="prompt", length=6)],
        "service.data_juicer.auto_start=true",
        f"service.data_juicer.command={command}",
    )
    before = services()
    stages.ready([config], 0, preflight.check)
    assert rows_of(tmp_path / "made.jsonl") and services() == before


def services() -> set[int]:
    """Processes of a Data-Juicer service that this one has."""
    children = psutil.Process().children(recursive=True)
    return {
        p.pid
        for p in children
        if p.status() != psutil.STATUS_ZOMBIE and "juicer_server" in " ".join(p.cmdline())
    }


@pytest.mark.parametrize(
    ("operators", "more", "said"),
    [
        ([op("dedup", fields=["prompt"])], "", "did you mean `dedupe`"),
        ([op("dedup", fields=["prompt"])], "", "service.data_juicer.server_url"),
        ([op("dedupe")], "", f"{KEY}.operators.0.args.fields is not set"),
        ([op("dedupe", fields=["a"], norm=1)], "", "does not take it; it takes fields, normalize"),
        (
            [op("required_fields", fields=["a"])],
            f"{KEY}.num_process=0",
            f"{KEY}.num_process=0: must be greater than 0",
        ),
        ([op("required_fields", fields=["a"])], f"{KEY}.timeout=0", f"{KEY}.timeout"),
        ([op("required_fields", fields=["a"])], f"{KEY}.top_k=0", f"{KEY}.top_k=0"),
        (
            [op("required_fields", fields=["a"])],
            f"{KEY}.inputs=[nowhere.jsonl]",
            f"{KEY}.inputs: nowhere.jsonl does not exist",
        ),
        ([op("required_fields", fields=["a"])], f"{KEY}.inputs=[]", f"{KEY}.inputs is empty"),
        ([op("required_fields", fields=["a"])], f"{KEY}.output.path=a.parquet", "name it .jsonl"),
        (
            [op("required_fields", fields=["a"])],
            f"{KEY}.target_fields=[prompt]",
            "leaves 'response' out",
        ),
        (
            [op("required_fields", fields=["a"])],
            f"+{KEY}.priority_weights.quality=1",
            "leave them out",
        ),
        (
            [op("difficulty_curriculum", field="hard")],
            f"{TASKSET}.shuffle=true",
            f"set {TASKSET}.shuffle=false",
        ),
        (
            [op("pass_rate_filter", samples="nowhere.jsonl")],
            "",
            "samples=nowhere.jsonl: no such file",
        ),
        ([op("length_filter", field="prompt", unit="tokens")], "", "known are chars, words"),
        ([op("difficulty_filter", field="hard")], "", "neither min_value nor max_value"),
        (
            [op("llm_difficulty_score_filter", api_or_hf_model="m", input_keys=["prompt"])],
            "",
            "set OPENAI_BASE_URL",
        ),
        (
            [op("mean"), op("a.py:B")],
            "service.data_juicer.server_url=http://127.0.0.1:9",
            "use one kind",
        ),
        (
            [op("mean")],
            "service.data_juicer.server_url=http://127.0.0.1:9",
            "no Data-Juicer service answers",
        ),
        ([op("mean")], "service.data_juicer.server_url=nowhere", "is no URL like"),
        (
            [op("mean")],
            "service.data_juicer.auto_start=true",
            "there is no Data-Juicer to start: make env-data-juicer",
        ),
        (
            [op("mean")],
            "service.data_juicer.auto_start=true service.data_juicer.command=juice",
            "write {port} in it",
        ),
        (
            [op("mean")],
            "service.data_juicer.auto_start=true service.data_juicer.command='juice {port}'",
            "no program 'juice'",
        ),
        (
            [op("mean")],
            "service.data_juicer.port=70000",
            "service.data_juicer.port=70000 is no port",
        ),
        ([], f"{KEY}.config_path=a.yaml", "service.data_juicer"),
        ([], "", f"{KEY}.operators is empty"),
    ],
)
def test_what_cannot_work_is_refused(
    assets: Path,
    tmp_path: Path,
    raw: Path,
    operators: list[Any],
    more: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.setattr(data_juicer, "PLACE", f"{tmp_path}/no-{{}}")  # whoever has made one
    words = split(more)
    with pytest.raises(ConfigError) as refused:
        configured(assets, tmp_path, raw, operators, *words)
    assert said in str(refused.value) and "\n" not in str(refused.value), refused.value
    assert not (tmp_path / "made.jsonl").exists()
