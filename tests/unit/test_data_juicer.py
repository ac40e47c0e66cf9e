"""The Data-Juicer client, operator and auto-start against a real HTTP server that speaks its API,
in its own process.
"""

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rft.config import DataJuicerConfig, ExperiencePipelineConfig, OperatorConfig
from rft.extras.environments.juicer_service import JuicerListener, JuicerService
from rft.extras.pipeline.data_juicer import (
    JuicerClient,
    JuicerError,
    JuicerServer,
    Refused,
    free_port,
)
from rft.extras.pipeline.experiences import ExperiencePipeline
from rft.extras.pipeline.worker_process import OperatorFailed
from rft.ground.experience import Experience
from tests.unit.test_experience_pipeline import group, is_dead, task, words

SERVER = Path(__file__).with_name("juicer_server.py")


def start(*arguments: str) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, str(SERVER), "--port", "0", *arguments], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, f"http://127.0.0.1:{process.stdout.readline().split()[-1]}"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    process, address = start()
    yield address
    process.kill()
    process.wait()


def processed(
    directory: Path,
    service: DataJuicerConfig,
    *operators: dict[str, Any],
    config_path: str | None = None,
    more: Any = (),
    times: int = 1,
) -> list[Experience]:
    """A group of three through a `data_juicer` with these operators, and through `more`."""
    args: dict[str, Any] = (
        {"operators": list(operators)} if operators else {"config_path": config_path}
    )
    given = ExperiencePipelineConfig(
        operators=[OperatorConfig(name="data_juicer", args=args), *more]
    )

    async def run() -> list[Experience]:
        pipeline = ExperiencePipeline(given, service, directory, batch_size=2)
        await pipeline.start(words)
        try:
            for _ in range(times):
                found = await pipeline.process(3, task(3), group(3, 0.0, 1.0, 2.0))
            return found.experiences
        finally:
            await pipeline.close()

    return asyncio.run(run())


def test_stats_go_into_info_and_shape_rewards(tmp_path: Path, url: str) -> None:
    """Row J10 and, behind it, J11."""
    shaping = OperatorConfig(
        name="reward_shaping_mapper",
        args={
            "reward_shaping_configs": [{"stats_key": "text_len", "op_type": "ADD", "weight": 0.5}]
        },
    )
    found = processed(
        tmp_path, DataJuicerConfig(server_url=url), {"text_length": {}}, more=[shaping]
    )
    assert [one.info for one in found] == [{"text_len": len("0 9")}] * 3, "a null is no stat"
    assert [one.reward for one in found] == [1.5, 2.5, 3.5]
    assert [list(one.tokens) for one in found] == [
        list(one.tokens) for one in group(3, 0.0, 1.0, 2.0)
    ]


def test_no_proxy_stands_between_a_machine_and_itself(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)

    async def health(where: str) -> None:
        client = JuicerClient(where, 20)
        try:
            await client.health()
        finally:
            await client.close()

    asyncio.run(health(url))
    asyncio.run(health(url.replace("127.0.0.1", "localhost")))
    with pytest.raises(JuicerError):  # nobody is at the proxy's port
        asyncio.run(health("http://127.0.0.1.example:5005"))


def test_the_service_may_filter_and_order_and_score(tmp_path: Path, url: str) -> None:
    found = processed(tmp_path, DataJuicerConfig(server_url=url + "/"), {"score": {"add": 10.0}})
    assert [(one.tokens[1], one.reward) for one in found] == [(2, 12.0), (1, 11.0), (0, 10.0)], (
        "each is the row that it was"
    )
    assert (
        processed(
            tmp_path,
            DataJuicerConfig(server_url=url),
            {"shorter_than": {"field": "response_text", "length": 1}},
        )
        == []
    )
    file = tmp_path / "juicer.yaml"
    file.write_text("process: []\n")
    assert processed(tmp_path, DataJuicerConfig(server_url=url), config_path=str(file))[0].info == {
        "text_len": 3
    }


@pytest.mark.parametrize(
    ("operator", "said"),
    [
        ("fail", "answered 500: ValueError: no operator fail"),
        ("page", "answered 500: <html>Internal Server Error</html>"),
        ("nonsense", "answered no Arrow stream"),
        ("twice", "gave a row back twice"),
        ("nowhere", "index 99, of 3 experiences"),
        ("hang", "gave no answer in 0.5 s"),
    ],
)
def test_a_service_that_misbehaves_costs_the_group_and_says_how(
    tmp_path: Path, url: str, operator: str, said: str
) -> None:
    with pytest.raises(OperatorFailed) as failed:
        processed(
            tmp_path,
            DataJuicerConfig(server_url=url, timeout=0.5 if operator == "hang" else 60.0),
            {operator: {}},
        )
    assert said in str(failed.value) and failed.value.operator == "data_juicer", failed.value


def test_a_service_that_was_started_anew_gets_its_operators_again(tmp_path: Path) -> None:
    process, address = start("--mood", "forgets")
    try:
        assert (
            len(
                processed(
                    tmp_path, DataJuicerConfig(server_url=address), {"text_length": {}}, times=2
                )
            )
            == 3
        )
    finally:
        process.kill()
        process.wait()


def test_what_the_service_refuses_keeps_the_run_from_starting(tmp_path: Path, url: str) -> None:
    with pytest.raises(
        OperatorFailed, match=r"data_juicer: Refused: .*/create answered 400: no file /nowhere.yaml"
    ):
        processed(tmp_path, DataJuicerConfig(server_url=url), config_path="/nowhere.yaml")
    nobody = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(OperatorFailed, match="ConnectError"):
        processed(tmp_path, DataJuicerConfig(server_url=nobody), {"text_length": {}})


# --- auto-start -----------------------------------------------------------------------------------


def service(*arguments: str, **settings: Any) -> DataJuicerConfig:
    command = f"{{python}} {SERVER} --port {{port}} {' '.join(arguments)}"
    return DataJuicerConfig(auto_start=True, command=command, **{"start_timeout": 60.0, **settings})


async def health(url: str) -> None:
    client = JuicerClient(url, 10.0)
    try:
        await client.health()
    finally:
        await client.close()


def test_a_service_is_started_and_ended_with_its_children(tmp_path: Path) -> None:
    mark = tmp_path / "pid"

    async def scenario() -> int:
        server = JuicerServer(
            service("--mood", "children", "--mark", str(mark)), tmp_path / "log" / "juicer.log"
        )
        address = await server.start()
        await health(address)
        assert server.process is not None
        pid = server.process.pid
        server.stop()
        with pytest.raises(JuicerError):
            await health(address)
        return pid

    pid = asyncio.run(scenario())
    assert is_dead(pid) and is_dead(int(mark.read_text())), "a child with a session of its own too"
    assert "serving at" in (tmp_path / "log" / "juicer.log").read_text()


def test_the_pipeline_starts_its_service_and_ends_it(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    found = processed(
        tmp_path, service("--mood", "children", "--mark", str(mark)), {"text_length": {}}
    )
    assert found[0].info == {"text_len": 3} and is_dead(int(mark.read_text()))


def test_the_start_has_a_deadline_and_a_late_service_is_waited_for(tmp_path: Path) -> None:
    """W49: the reference asks for ever."""

    async def scenario() -> None:
        mute = JuicerServer(service("--mood", "mute", start_timeout=3.0), tmp_path / "mute.log")
        with pytest.raises(
            JuicerError,
            match=r"did not answer in 3 s .*start_timeout.*mute.log, which ends with: serving at",
        ):
            await mute.start()
        assert mute.process is None
        dead = JuicerServer(service("--mood", "dead"), tmp_path / "dead.log")
        with pytest.raises(
            JuicerError, match=r"ended 3 times before it served.*cannot import data_juicer"
        ):
            await dead.start()
        late = JuicerServer(service("--mood", "late"), tmp_path / "late.log")
        await health(await late.start())
        late.stop()

    asyncio.run(scenario())


def test_our_service_answers_who_has_its_token_which_is_in_no_words() -> None:
    class Service(JuicerService):
        token = "a-token"

    async def said(url: str) -> str:
        client = JuicerClient(url, 5.0)
        await client.health()
        with pytest.raises(Refused) as refused:
            await client.create({"operators": []})
        await client.close()
        return str(refused.value)

    async def scenario(port: int) -> None:
        assert "401" in await said(f"http://127.0.0.1:{port}")
        assert "401" in await said(f"http://rft:another@127.0.0.1:{port}")
        known = await said(f"http://rft:a%2Dtoken@127.0.0.1:{port}")
        assert "400: there are no operators" in known and "a-token" not in known

    server = JuicerListener(("127.0.0.1", 0), Service)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        asyncio.run(scenario(server.server_port))
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_port_that_is_taken_is_not_trusted(tmp_path: Path, url: str) -> None:
    """Another service answers at the port of the config: ours gets a free one.

    A free port of the config is used.
    """

    async def scenario() -> None:
        taken = int(url.rpartition(":")[2])
        server = JuicerServer(service(port=taken), tmp_path / "a.log")
        address = await server.start()
        assert address != url
        server.stop()
        wanted = free_port()
        server = JuicerServer(service(port=wanted), tmp_path / "b.log")
        assert await server.start() == f"http://127.0.0.1:{wanted}"
        server.stop()

    asyncio.run(scenario())


def test_a_reserved_port_is_given_to_nobody_by_chance() -> None:
    port = free_port()
    for _ in range(200):
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            assert other.getsockname()[1] != port
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
