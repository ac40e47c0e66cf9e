"""Reward functions by value, and the pool with functions that
hang, raise, print, exit and get killed.
"""

import asyncio
import os
import random
import re
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from rft.config import ConfigError, TasksetConfig
from rft.ground.experience import Sampling, Task
from rft.ground.process import Child
from rft.preflight.inputs_flows import _strange_args, own_reward
from rft.rollout import reward_pool, rewards
from rft.rollout.reward_pool import QUICK_CHARACTERS, RewardPool, are_quick
from rft.rollout.rewards.text import last_boxed, tagged

SAYS_TWO = """
    from rft.ground.experience import encode
    from rft.ground.process import frame, parents_socket
    from rft.rollout.reward_worker import RewardResult

    connection = parents_socket()
    connection.sendall(b"".join(frame(encode(RewardResult(reward=r))) for r in (1.0, 2.0)))
    connection.recv(1)
"""

USER_CODE = """
    import os, signal, subprocess, sys, time

    def good(response, truth, task, **args):
        return 1.0 if response == truth else 0.25

    def by_response(response, truth, task, **args):
        if response == "hang":
            while True:
                pass
        if response == "stuck regex":  # holds the GIL: no signal handler and no thread runs
            import re
            re.match(r"(a+)+$", "a" * 64 + "b")
        if response == "child":
            child = subprocess.Popen(["sleep", "600"])
            open(args["file"], "w").write(str(child.pid))
            while True:
                pass
        if response == "raise":
            raise KeyError("no such thing")
        if response == "exit":
            sys.exit(0)
        if response == "hard exit":
            os._exit(7)
        if response == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if response == "print":
            print("x" * 100000, flush=True)
            os.write(1, b"\\x00\\x00\\x00\\x02{}")
            os.system("echo from a child")
        if response == "stdin":
            return float(len(sys.stdin.read()))
        if response == "pid":
            return float(os.getpid())
        return {"nan": float("nan"), "inf": float("inf"), "none": None, "text": "1.0",
                "dict": {"accuracy": 1, "format": 0.5},
                 "bad dict": {"a": 1, "b": None}}.get(response, 1.0)
"""


def task(reward: str = "exact_match", truth: str | None = "42", **args: Any) -> Task:
    return Task(
        id="t/0/0",
        taskset="t",
        row=0,
        prompt="6*7=",
        truth=truth,
        reward=reward,
        reward_args=args,
        sampling=Sampling(),
    )


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(textwrap.dedent(USER_CODE))
    return file


def with_pool(
    body: Callable[[RewardPool], Awaitable[None]], workers: int = 1, timeout_s: float = 30.0
) -> None:
    async def run() -> None:
        async with RewardPool(workers, timeout_s) as pool:
            await body(pool)

    asyncio.run(asyncio.wait_for(run(), 120))


# Functions


@pytest.mark.parametrize(
    ("name", "response", "truth", "args", "expected"),
    [
        ("exact_match", " 42\n", "42", {}, 1.0),
        ("exact_match", "421", "42", {}, 0.0),
        ("exact_match", "Yes", "yes", {}, 0.0),
        ("exact_match", "Yes", "yes", {"ignore_case": True}, 1.0),
        ("exact_match", "first =1, then =42.", "42", {"pattern": r"=(\d+)"}, 1.0),
        ("exact_match", "no number", "42", {"pattern": r"\d+"}, 0.0),
        ("math", "so the answer is $\\frac{1}{2}$", "0.5", {}, 1.0),
        ("math", "so the answer is $\\frac{1}{3}$", "0.5", {}, 0.0),
        ("math", "x = 3", "long derivation\n#### 3", {}, 1.0),
        ("math", "nothing here", "3", {}, 0.0),
        ("math_boxed", "5 or \\boxed{\\frac{1}{2}}", "\\frac{2}{4}", {}, 1.0),
        ("math_boxed", "the answer is $\\frac{1}{2}$", "\\frac{1}{2}", {}, 0.0),
        ("format", "<think>hm</think> 4", "4", {}, 1.0),
        ("format", "<think>hm</think>  ", "4", {}, 0.0),
        ("format", "hm 4", "4", {}, 0.0),
        ("format", "A: 4", None, {"pattern": r"A: \d", "score": 0.1}, 0.1),
        ("accuracy", "7 and 5 make <answer>1,200.0</answer>", "#### 1200", {}, 1.0),
        ("accuracy", "it is 12, then 13", "13", {}, 1.0),
        ("accuracy", "it is 13, then 12", "13", {}, 0.0),
        ("accuracy", "\\boxed{Paris}", "paris", {}, 1.0),
        ("accuracy", "no idea", "13", {}, 0.0),
        ("accuracy", "so it is \u22125", "-5", {}, 1.0),
        ("accuracy", "it is one of 3-4", "4", {}, 1.0),
        ("accuracy", "it is 4 or -4", "-4", {}, 1.0),
        ("accuracy", "9" * 400, "9" * 400, {}, 1.0),
        ("accuracy", "so 2", "\\frac{1}{2}", {}, 0.0),
        ("accuracy", "\\boxed{\\frac{1}{2}}", "\\frac{1}{2}", {}, 1.0),
        ("accuracy", "so 2", "(1, 2)", {}, 0.0),
        ("accuracy", "so 2", "1 or 2", {}, 0.0),
        ("accuracy", "so 2", "H2O", {}, 0.0),
        ("accuracy", "so 72.0", "72 apples.", {}, 1.0),
        ("accuracy", "so -5", "\u22125", {}, 1.0),
        ("gsm8k", "#### \u22125", "#### -5", {}, 1.0),
        ("gsm8k", f"#### {'9' * 400}", "#### 5", {}, 0.0),
    ],
)
def test_a_built_in_reward_gives_its_number(
    name: str, response: str, truth: str, args: dict, expected: float
) -> None:
    assert rewards.resolve(name)(response, truth, task(name, truth), **args) == expected


def test_tags_are_those_of_the_pattern_however_many_have_no_end() -> None:
    """A model that repeats itself writes thousands; by the pattern these would take minutes."""
    parts = ("<answer>", "</answer>", "<", "a", "\n", " ")
    dice = random.Random(7)
    for _ in range(2000):
        said = "".join(dice.choices(parts, k=12))
        assert tagged(said, "answer") == re.findall("<answer>(.*?)</answer>", said, re.DOTALL)
    many = "<answer>" * 100_000
    assert tagged(f"<answer>4</answer>{many}", "answer") == ["4"]
    for name in ("accuracy", "countdown", "countdown_reward", "tool_call_reward"):
        asked = task(name, "5")
        asked.raw = {"numbers": [5], "target": 5, "answer": "[]"}
        told = rewards.resolve(name)(many + "<tool_call>" * 100_000, "5", asked)
        assert (sum(told.values()) if isinstance(told, dict) else told) == 0.0


@pytest.mark.parametrize("name", ["exact_match", "math", "math_boxed", "accuracy"])
def test_a_missing_reference_answer_is_refused_not_scored_zero(name: str) -> None:
    with pytest.raises(ValueError, match="no reference answer"):
        rewards.resolve(name)("\\boxed{1}", None, task(name))


def test_the_last_box_is_read_with_balanced_braces() -> None:
    assert last_boxed("\\boxed{1} \\boxed{\\frac{1}{2}} end") == "\\frac{1}{2}"
    assert last_boxed("\\boxed{1") is None


def test_an_unknown_reward_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'math_boxed'"):
        rewards.resolve("math_boxd")


def test_a_users_function_is_found_by_module_and_by_file(
    user_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rewards.resolve(f"{user_file}:good")("42", "42", task()) == 1.0
    monkeypatch.syspath_prepend(str(user_file.parent))
    assert rewards.resolve("mine:good")("41", "42", task()) == 0.25


@pytest.mark.parametrize("path", ["no_such_module:f", "no/such/file.py:f", "{file}:missing"])
def test_a_wrong_import_path_says_what_is_missing(path: str, user_file: Path) -> None:
    with pytest.raises(ConfigError, match="no such file|cannot import|has no function 'missing'"):
        rewards.resolve(path.format(file=user_file))


# Pool


def test_a_group_is_scored_in_order_and_a_dict_is_summed_and_kept_as_metrics(
    user_file: Path,
) -> None:
    mine = task(f"{user_file}:by_response")

    async def body(pool: RewardPool) -> None:
        results = await pool.score(
            [(task(), "42"), (task(), "41"), (mine, "dict"), (mine, "anything")]
        )
        assert [result.outcome for result in results] == ["ok"] * 4
        assert [result.reward for result in results] == [1.0, 0.0, 1.5, 1.0]
        assert results[2].metrics == {"accuracy": 1.0, "format": 0.5}
        assert await pool.score([]) == []

    with_pool(body)


@pytest.mark.parametrize("hang", ["hang", "stuck regex"])
def test_a_hanging_reward_is_a_timeout_and_costs_only_itself(hang: str, user_file: Path) -> None:
    mine = task(f"{user_file}:by_response")

    async def body(pool: RewardPool) -> None:
        results = await pool.score(
            [(mine, "a"), (mine, hang), (mine, "b"), (mine, hang), (mine, "c")]
        )
        assert [result.outcome for result in results] == ["ok", "timeout", "ok", "timeout", "ok"]
        assert "longer than 0.5 s" in results[1].message
        assert pool.replaced == 2
        assert (await pool.score([(mine, "again")]))[0].outcome == "ok"

    with_pool(body, timeout_s=0.5)


def test_the_processes_that_a_hanging_reward_started_die_with_it(
    user_file: Path, tmp_path: Path
) -> None:
    mine = task(f"{user_file}:by_response", file=str(tmp_path / "pid"))

    async def body(pool: RewardPool) -> None:
        assert (await pool.score([(mine, "child")]))[0].outcome == "timeout"

    with_pool(body, timeout_s=1.0)
    pid = int((tmp_path / "pid").read_text())
    psutil.wait_procs(
        [psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=10
    )  # killed; on a busy machine not yet gone
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("response", "message"),
    [
        ("raise", "KeyError: 'no such thing' .*mine.py:"),
        ("exit", "SystemExit"),
        ("nan", "must be finite, not nan"),
        ("inf", "must be finite, not inf"),
        ("none", "must be a number, not None"),
        ("text", "must be a number, not '1.0'"),
        ("bad dict", "must be a number, not None"),
        ("hard exit", "its process exited with code 7"),
        ("kill", "its process was killed by SIGKILL"),
    ],
)
def test_a_failing_reward_is_an_error_with_its_reason(
    response: str, message: str, user_file: Path
) -> None:
    mine = task(f"{user_file}:by_response")

    async def body(pool: RewardPool) -> None:
        before, failed, after = await pool.score([(mine, "a"), (mine, response), (mine, "b")])
        assert (before.outcome, after.outcome) == ("ok", "ok")
        assert failed.outcome == "error"
        assert re.search(message, failed.message), failed.message

    with_pool(body)


def test_a_reward_that_cannot_be_imported_is_an_error_of_its_own_items_only(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise RuntimeError('at import')")
    broken = task(f"{tmp_path / 'broken.py'}:f")

    async def body(pool: RewardPool) -> None:
        failed, fine = await pool.score([(broken, "a"), (task(), "42")])
        assert failed.outcome == "error" and "at import" in failed.message
        assert fine.reward == 1.0

    with_pool(body)


def test_functions_are_imported_before_the_first_group_asks(tmp_path: Path) -> None:
    """By each worker; what cannot be imported is told to who asks for it, and to nobody else."""
    (tmp_path / "slow.py").write_text(
        textwrap.dedent(
            f"""
            import os, pathlib
            pathlib.Path({str(tmp_path)!r}, f"{{os.getpid()}}.imported").touch()

            def reward(response, truth, task):
                return float(os.getpid())
            """
        )
    )
    (tmp_path / "ends.py").write_text("import os\nos._exit(3)\ndef reward(*_): return 1.0\n")
    good, bad = f"{tmp_path}/slow.py:reward", f"{tmp_path}/ends.py:reward"

    async def run() -> None:
        pool = RewardPool(2, 30.0)
        await pool.start([(good, {})])
        await asyncio.gather(*pool._importing)
        imported = {float(one.stem) for one in tmp_path.glob("*.imported")}
        assert len(imported) == 2
        (scored,) = await pool.score([(task(good), "")])
        assert scored.reward in imported and pool.replaced == 0
        await pool.close()
        pool = RewardPool(1, 30.0)
        await pool.start([(bad, {}), (good, {})])
        await asyncio.gather(*pool._importing)
        (scored,) = await pool.score([(task(good), "")])
        assert scored.outcome == "ok" and pool.replaced == 1
        (failed,) = await pool.score([(task(bad), "")])
        assert failed.outcome == "error" and "while importing it" in failed.message
        await pool.close()

    asyncio.run(asyncio.wait_for(run(), 120))


OWN = """
async def later(response, truth, task, weight):
    return weight * (response == truth)

def trl(completions, **kwargs):
    return [1.0 for _ in completions]

def of_verl(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth)

def narrow(response, truth):
    return 1.0

def long(response, truth, task, response_tokens):
    return 1.0 / response_tokens
"""


def test_a_function_of_the_users_own_is_looked_at_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)

    def problems(function: str, **args: Any) -> list[str]:
        name = f"{tmp_path}/own.py:{function}"
        taskset = TasksetConfig(path="t", default_reward_fn_type=name, reward_fn_args=args)
        return [*own_reward("set", name, args), *_strange_args("set", taskset)]

    assert problems("later", weight=0.5) == [] == problems("long")
    assert "missing a required argument: 'weight'" in problems("later")[0]
    assert [
        "does not take it; did you mean `weight`" in one
        for one in problems("later", wight=1, weight=1)
    ] == [True]
    [said] = problems("of_verl")
    assert (
        f"set it to verl, and set.reward_fn_args to {{path: {tmp_path}/own.py, function: of_verl}}"
        in said
    )
    for function in ("trl", "narrow"):
        [said] = problems(function)
        assert "is called with response, truth, task: too many positional" in said


def test_a_reward_may_be_async(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    of = task(f"{tmp_path}/own.py:later", weight=0.5)

    async def body(pool: RewardPool) -> None:
        right, wrong = await pool.score([(of, "42"), (of, "41")])
        assert (right.reward, wrong.reward) == (0.5, 0.0) and right.outcome == "ok"

    with_pool(body)


def test_a_module_that_ends_the_process_at_import_is_an_error_not_a_loop(tmp_path: Path) -> None:
    (tmp_path / "deadly.py").write_text("import os; os._exit(3)")
    deadly = task(f"{tmp_path / 'deadly.py'}:f")

    async def body(pool: RewardPool) -> None:
        results = await pool.score([(deadly, "a"), (deadly, "b")])
        assert [result.outcome for result in results] == ["error", "error"]
        assert "code 3 (while importing it)" in results[0].message
        assert pool.replaced == 2

    with_pool(body)


def test_what_a_reward_prints_does_not_reach_the_frames(
    user_file: Path, capfd: pytest.CaptureFixture
) -> None:
    mine = task(f"{user_file}:by_response")

    async def body(pool: RewardPool) -> None:
        results = await pool.score([(mine, "print"), (mine, "stdin"), (mine, "dict")])
        assert [(result.outcome, result.reward) for result in results] == [
            ("ok", 1.0),
            ("ok", 0.0),
            ("ok", 1.5),
        ]

    with_pool(body)
    captured = capfd.readouterr()
    assert "from a child" in captured.err and captured.out == ""


def test_a_worker_killed_over_a_reward_does_it_again(tmp_path: Path) -> None:
    """As the machine's memory killer may: nobody's fault, and no word of a reward that is not."""
    os.mkfifo(tmp_path / "begun")
    (tmp_path / "slow.py").write_text(
        "import os, time\n"
        "def f(response, truth, task, place):\n"
        "    if not os.path.exists(f'{place}/again'):\n"
        "        open(f'{place}/again', 'w').close()\n"
        "        open(f'{place}/begun', 'w').write(str(os.getpid()))\n"
        "        time.sleep(60)\n"
        "    return 0.5\n"
    )
    slow = task(f"{tmp_path / 'slow.py'}:f", place=str(tmp_path))

    async def body(pool: RewardPool) -> None:
        scoring = asyncio.create_task(pool.score([(task(), "42"), (slow, "a"), (task(), "42")]))
        os.kill(int(await asyncio.to_thread((tmp_path / "begun").read_text)), signal.SIGKILL)
        found = [(result.outcome, result.reward) for result in await scoring]
        assert found == [("ok", 1.0), ("ok", 0.5), ("ok", 1.0)]
        assert pool.replaced == 1

    with_pool(body)


STOPS = """
import os, signal
def f(response, truth, task, place):
    if not os.path.exists(f"{place}/again"):
        open(f"{place}/again", "w").close()
        os.kill(os.getpid(), signal.SIGSTOP)
    return 0.5
"""


def test_time_in_which_a_worker_is_stopped_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped for longer than a reward may take, then let go on."""
    (tmp_path / "stops.py").write_text(STOPS)
    stops = task(f"{tmp_path / 'stops.py'}:f", place=str(tmp_path))
    looks = 0

    class Watched(Child):
        @property
        def stopped(self) -> bool:
            nonlocal looks
            assert self._process is not None
            is_stopped = super().stopped
            looks += is_stopped
            if looks == 2 * reward_pool.LOOKS:
                self._process.send_signal(signal.SIGCONT)
            return is_stopped

    monkeypatch.setattr(reward_pool, "Child", Watched)

    async def body(pool: RewardPool) -> None:
        found = [(result.outcome, result.reward) for result in await pool.score([(stops, "a")])]
        assert found == [("ok", 0.5)]
        assert pool.replaced == 0 and looks >= 2 * reward_pool.LOOKS

    with_pool(body, timeout_s=2.0)


def test_a_worker_that_stays_stopped_is_replaced_and_its_reward_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stops.py").write_text(STOPS)
    stops = task(f"{tmp_path / 'stops.py'}:f", place=str(tmp_path))
    monkeypatch.setattr(reward_pool, "STOPPED_S", 0.05)
    monkeypatch.setattr(reward_pool, "LOOKS", 3000)

    async def body(pool: RewardPool) -> None:
        results = await pool.score([(task(), "42"), (stops, "a"), (task(), "42")])
        assert [result.reward for result in results] == [1.0, 0.5, 1.0]
        assert pool.replaced == 1

    with_pool(body)


def test_a_stop_of_the_pools_own_process_makes_no_timeout_of_what_is_there(tmp_path: Path) -> None:
    """As if this process did not run from when the reward began until long after its end."""
    os.mkfifo(tmp_path / "begun")
    os.mkfifo(tmp_path / "go")
    (tmp_path / "tells.py").write_text(
        "def f(response, truth, task, place):\n"
        "    open(f'{place}/begun', 'w').close()\n"
        "    open(f'{place}/go').close()\n"
        "    return 0.5\n"
    )
    tells = task(f"{tmp_path / 'tells.py'}:f", place=str(tmp_path))

    async def body(pool: RewardPool) -> None:
        scoring = asyncio.create_task(pool.score([(tells, "a")]))
        await asyncio.to_thread((tmp_path / "begun").read_bytes)
        (tmp_path / "go").write_bytes(b"")
        end = asyncio.get_running_loop().time() + 1.0
        while asyncio.get_running_loop().time() < end:
            select.select([pool._workers[0]._socket], [], [], 0.1)
        assert [result.outcome for result in await scoring] == ["ok"]

    with_pool(body, timeout_s=0.5)


def test_a_worker_killed_while_idle_is_replaced_and_nobody_is_blamed(user_file: Path) -> None:
    mine = task(f"{user_file}:by_response")

    async def body(pool: RewardPool) -> None:
        first = (await pool.score([(mine, "pid")]))[0].reward
        os.kill(int(first), signal.SIGKILL)
        second = (await pool.score([(mine, "pid")]))[0]
        assert second.outcome == "ok" and second.reward != first
        third = (await pool.score([(mine, "pid")]))[0]
        assert third.reward == second.reward  # a healthy worker is kept

    with_pool(body)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_lost_while_idle_is_replaced_although_nobody_asks(
    end: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward_pool, "ATTEND_S", 0.02)
    monkeypatch.setattr(reward_pool, "STOPPED_S", 0.1)

    async def body(pool: RewardPool) -> None:
        await pool.start()
        worker = pool._workers[0]
        before = worker._process
        assert before is not None
        os.kill(before.pid, end)
        async with asyncio.timeout(30):
            while not pool.replaced:
                await asyncio.sleep(0)
        assert pool.replaced == 1 and worker.alive and worker._process is not before

    with_pool(body)


def test_what_a_killed_process_had_said_is_not_heard_from_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames are read several at a time, so some are there before anybody asks for them."""
    (tmp_path / "says_two.py").write_text(textwrap.dedent(SAYS_TWO))
    monkeypatch.syspath_prepend(tmp_path)

    async def scenario() -> None:
        child = Child("says_two")
        child.start()
        first = await child.receive()
        child.kill()
        child.start()
        assert await child.receive() == first
        assert child.come() not in (None, first)
        child.kill()
        child.reap()

    asyncio.run(scenario())


def test_a_cancelled_group_leaves_no_answers_for_the_next(user_file: Path) -> None:
    mine = task(f"{user_file}:by_response")

    async def body(pool: RewardPool) -> None:
        await pool.score([(mine, "warm")])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pool.score([(mine, "hang"), (mine, "dict")]), 0.2)
        assert (await pool.score([(task(), "41")]))[0].reward == 0.0

    with_pool(body)


def test_groups_wait_for_an_idle_worker_and_all_get_their_own_results(user_file: Path) -> None:
    async def body(pool: RewardPool) -> None:
        groups = [[(task(truth=str(i)), str(j)) for j in range(4)] for i in range(8)]
        results = await asyncio.gather(*(pool.score(group) for group in groups))
        assert [[int(result.reward) for result in group] for group in results] == [
            [int(i == j) for j in range(4)] for i in range(8)
        ]

    with_pool(body, workers=2)


QUICK_ITEMS = [
    (task(), " 42\n"),
    (task(), "41"),
    (task(truth="É", ignore_case=True), "é"),
    (task("gsm8k", truth="so #### 1,200"), "x #### 1200."),
    (task("gsm8k", truth="so #### 1,200", score=0.5), "#### 1200"),
    (task("gsm8k", truth="no number"), "#### 1"),  # an error of the data
    (task(truth=None), "42"),
    (task(no_such_argument=1), "42"),
    (task("gsm8k", truth="#### 1", score=float("inf")), "#### 1"),
]


def test_quick_rewards_have_no_process_and_what_they_say_is_what_a_worker_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def score() -> tuple[list[Any], list[psutil.Process]]:
        pool = RewardPool(1, 30.0)
        results = [(await pool.score([item]))[0] for item in QUICK_ITEMS]
        children = psutil.Process().children()
        await pool.close()
        with pytest.raises(RuntimeError, match="closed"):
            await pool.score(QUICK_ITEMS[:1])
        return results, children

    here, children = asyncio.run(score())
    monkeypatch.setattr(rewards, "QUICK", {})
    there, workers = asyncio.run(score())
    assert here == there and len(workers) == len(children) + 1
    assert [r.reward for r in here[:5]] == [1.0, 0.0, 1.0, 1.0, 0.5]
    assert [r.outcome for r in here[5:]] == ["error"] * 4


def test_a_quick_reward_over_its_deadline_is_a_timeout_in_the_words_of_a_workers() -> None:
    async def body(pool: RewardPool) -> None:
        (found,) = await pool.score([(task(), "42")])
        assert found.outcome == "timeout" and pool.replaced == 0
        assert found.message == "reward 'exact_match' ran longer than 1e-09 s"

    with_pool(body, timeout_s=1e-9)


def test_users_patterns_and_functions_and_long_texts_are_scored_where_they_can_be_killed(
    user_file: Path,
) -> None:
    assert are_quick([(task(), "42")])
    assert not are_quick([(task(), "42"), (task(f"{user_file}:by_response"), "42")])
    assert not are_quick([(task(), "4" * QUICK_CHARACTERS)])

    async def body(pool: RewardPool) -> None:
        hangs = task(pattern=r"(a+)+$")
        found = await pool.score([(hangs, "a" * 40 + "b"), (hangs, "42")])
        assert [one.outcome for one in found] == ["timeout", "ok"] and pool.replaced == 1

    with_pool(body, timeout_s=2.0)


def test_close_leaves_no_process_even_in_the_middle_of_a_hang(user_file: Path) -> None:
    mine = task(f"{user_file}:by_response")

    async def run() -> list[psutil.Process]:
        pool = RewardPool(2, timeout_s=60)
        await pool.start()
        pids = [int((await pool.score([(mine, "pid")]))[0].reward) for _ in range(2)]
        processes = [psutil.Process(pid) for pid in pids]
        # one of them waits in line
        scoring = [asyncio.ensure_future(pool.score([(mine, "hang")])) for _ in range(3)]
        await asyncio.sleep(0)
        await pool.close()
        outcomes = await asyncio.wait_for(asyncio.gather(*scoring, return_exceptions=True), 10)
        assert all(
            isinstance(outcome, RuntimeError) and "closed" in str(outcome) for outcome in outcomes
        ), outcomes
        with pytest.raises(RuntimeError, match="closed"):
            await pool.score([(mine, "x")])
        return processes

    assert not any(process.is_running() for process in asyncio.run(run()))


@pytest.mark.parametrize("response", ["pid", "hang"])
def test_a_worker_dies_with_its_parent(response: str, user_file: Path) -> None:
    program = f"""
import asyncio, os, signal
from rft.ground.experience import Sampling, Task
from rft.rollout.reward_pool import RewardPool
async def main():
    pool = RewardPool(1, 60)
    t = Task(id="t", taskset="t", row=0, prompt="p", reward="{user_file}:by_response",
             sampling=Sampling())
    print(int((await pool.score([(t, "pid")]))[0].reward), flush=True)
    if "{response}" == "hang":
        asyncio.ensure_future(pool.score([(t, "hang")]))
        await asyncio.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    psutil.wait_procs(
        [psutil.Process(pid) for pid in [int(done.stdout)] if psutil.pid_exists(pid)], timeout=10
    )
    assert not psutil.pid_exists(int(done.stdout))


def test_a_worker_leads_a_group_of_this_session_is_not_stopped_by_its_terminal_and_writes_no_core(
    tmp_path: Path,
) -> None:
    """A session would be a scheduling group of its own, which waits for long on a busy core."""
    (tmp_path / "look.py").write_text(
        "import os, resource, signal\n"
        "def look(response, truth, task):\n"
        "    return {'leads': os.getpgid(0) == os.getpid(), 'session': os.getsid(0),\n"
        "            'stops': signal.getsignal(signal.SIGTTIN) != signal.SIG_IGN,\n"
        "            'core': resource.getrlimit(resource.RLIMIT_CORE)[0]}\n"
    )

    async def body(pool: RewardPool) -> None:
        (result,) = await pool.score([(task(f"{tmp_path / 'look.py'}:look"), "")])
        expected = {"leads": 1.0, "session": float(os.getsid(0)), "stops": 0.0, "core": 0.0}
        assert result.metrics == expected

    with_pool(body)
