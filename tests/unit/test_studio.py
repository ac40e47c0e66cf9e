"""The config studio: what it calls ready is a file that `rft train --config` takes, and what it
refuses names its key.
"""

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rft import config as configs
from rft import preflight
from rft.tools import config as config_tool
from rft.tools import studio, studio_fields
from rft.tools.local_page import PageServer

TASKSET = studio_fields.TASKSET


def given(assets: Path, root: Path, mode: str, recipe: str) -> dict[str, str]:
    """What a user has to say at least."""
    values = {
        "model.model_path": str(assets / "model"),
        "model.max_prompt_tokens": "16",
        "model.max_response_tokens": "8",
        "checkpoint_root_dir": str(root / "runs"),
        "name": "made",
        "mode": mode,
        "device": "cpu",
        "buffer.batch_size": "8",
    }
    if recipe == "sft":
        data = "buffer.trainer_input.experience_buffer"
        return values | {
            f"{data}.path": str(assets / "train.jsonl"),
            "buffer.train_batch_size": "8",
        }
    if mode == "bench":
        one = (
            f"{{name: held_out, path: {assets / 'eval.jsonl'}, format: {{prompt_type: plaintext}}}}"
        )
        values["buffer.explorer_input.eval_tasksets"] = f"[{one}]"
    return values | {f"{TASKSET}.path": str(assets / "train.jsonl")}


CASES = [
    (recipe, mode) for recipe in ("grpo", "ppo") for mode in ("both", "explore", "train", "bench")
]


@pytest.mark.parametrize(("recipe", "mode"), [*CASES, ("sft", "train")])
def test_what_is_ready_is_a_file_that_train_takes(
    assets: Path, tmp_path: Path, recipe: str, mode: str
) -> None:
    values = given(assets, tmp_path, mode, recipe)
    found = studio.examine(recipe, values)
    assert found["problems"] == [] and found["ready"]
    file = tmp_path / "made.yaml"
    file.write_text(found["yaml"], encoding="utf-8")
    (config,) = configs.stage_configs(config_tool.composed(["--config", str(file)]))
    preflight.check(preflight.fill(config))
    for key, text in values.items():
        if not key.endswith("eval_tasksets"):
            assert str(configs.get(config, key)) == text
    assert config.algorithm.algorithm_type == recipe


def test_everything_that_is_missing_is_named_at_once() -> None:
    found = studio.examine("grpo", {})
    assert {problem["key"] for problem in found["problems"]} == {
        "model.model_path",
        f"{TASKSET}.path",
    }
    assert not found["ready"]


@pytest.mark.parametrize(
    ("key", "text", "fix"),
    [
        ("buffer.batch_size", "many", "whole number"),
        ("buffer.batch_size", "0", "greater than 0"),
        ("algorithm.kl_loss_fn", "k9", "k3"),
        ("model.max_prompt_tokens", "900", "context"),
        ("buffer.explorer_input.eval_tasksets", "[{", "no YAML"),
        ("name", "${", "no viable alternative"),
        ("buffer.explorer_input.eval_tasksets", "[{}]", "path is not set"),
        ("trainer.totl_steps", "1", "trainer.total_steps"),
        (f"{TASKSET}.path", "nowhere.jsonl", "does not exist"),
        ("model.model_path", "nowhere", "model.model_path"),
    ],
)
def test_a_problem_stands_at_its_key(
    assets: Path, tmp_path: Path, key: str, text: str, fix: str
) -> None:
    found = studio.examine("grpo", given(assets, tmp_path, "both", "grpo") | {key: text})
    (problem,) = found["problems"]
    assert fix in problem["said"]
    assert problem["key"] in (key, "model.max_model_len")
    assert not (tmp_path / "runs").exists(), "a question leaves nothing behind"


def test_variables_stay_variables_and_no_secret_is_in_the_file(
    assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = given(assets, tmp_path, "both", "grpo") | {"monitor.monitor_type": "wandb"}
    root, args = "checkpoint_root_dir", "monitor.monitor_args"
    named = values | {root: "${oc.env:OUT}/runs", args: "{api_key: '${oc.env:MY_KEY}'}"}
    found = studio.examine("grpo", named)
    assert [problem["key"] for problem in found["problems"]][0] == root
    assert "'OUT' not found" in found["problems"][0]["said"] and found["now"][root] == named[root]
    monkeypatch.setenv("OUT", str(tmp_path)), monkeypatch.setenv("MY_KEY", "a key of mine")
    found = studio.examine("grpo", named)
    assert found["ready"], found["problems"]
    assert f"{root}: ${{oc.env:OUT}}/runs\n" in found["yaml"]
    assert "api_key: ${oc.env:MY_KEY}\n" in found["yaml"]
    (problem,) = studio.examine("grpo", values | {args: "{api_key: 0123456}"})["problems"]
    assert problem["key"] == args and "give ${oc.env:VARIABLE}" in problem["said"]


def test_a_run_may_be_called_by_its_day() -> None:
    assert studio.examine("grpo", {"name": "2026-11-30"})["now"]["name"] == "'2026-11-30'"


def test_the_gpus_and_the_memory_are_those_of_the_config(assets: Path, tmp_path: Path) -> None:
    values = given(assets, tmp_path, "both", "grpo") | {
        "device": "cuda",
        "cluster.gpu_per_node": "8",
    }
    more = {
        "explorer.rollout_model.engine_num": "2",
        "trainer.megatron.tensor_model_parallel_size": "2",
    }
    plan = {what: said for what, said, _ in studio.examine("grpo", values | more)["plan"]}
    assert plan["GPUs"] == "1 x 8 = 8: 2 for engines, 6 for the trainer"
    assert plan["trainer ranks"] == "6, tp2 pp1 cp1"
    assert plan["batch"].startswith(
        "64 experiences a step over 3 copies of the model, which does not divide"
    )
    assert "weights" in plan["memory per rank"]
    found = studio.examine("grpo", values | {"explorer.rollout_model.engine_num": "8"})
    assert found["plan"][0][2] is False, "nothing is left for the trainer"
    assert found["problems"][0]["key"] in ("explorer.rollout_model.engine_num", "cluster.node_num")


def test_every_key_of_the_schema_has_one_place() -> None:
    keys = [field.key for field in studio_fields.fields()]
    assert len(set(keys)) == len(keys)
    assert set(configs.leaf_keys()) - {TASKSET} - set(studio_fields.NOT_SET_HERE) == set(keys)
    assert {field.part for field in studio_fields.fields()} == set(studio_fields.PARTS)
    page = studio.described()
    assert list(page["beginner"]) == ["Basic", "Important"] and len(page["parts"]) > 4
    shown = [key for part in page["beginner"].values() for key in part]
    assert len(set(shown)) == len(shown) and set(shown) <= set(keys)
    for start, other, _ in studio_fields.VISIBLE:
        assert other in keys and any(key.startswith(start) for key in keys), (
            f"{start} or {other} is no key"
        )


def test_keys_show_up_with_what_they_belong_to() -> None:
    assert not studio_fields.is_visible("critic.optim.lr", {"algorithm.algorithm_type": "grpo"})
    assert studio_fields.is_visible("critic.optim.lr", {"algorithm.algorithm_type": "ppo"})
    assert not studio_fields.is_visible(
        "trainer.max_token_len_per_gpu", {"mode": "both", "trainer.use_dynamic_bsz": False}
    )
    assert studio_fields.is_visible("model.model_path", {"mode": "train"})


@pytest.fixture
def server() -> Iterator[PageServer]:
    with PageServer(0, studio.PAGE, studio.ANSWERS) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def answered(
    server: PageServer, method: str, path: str, body: str | None = None, **headers: str | None
) -> http.client.HTTPResponse:
    """As our own page would ask, but for `headers`: Content_Type=..., None leaves one out."""
    own: dict[str, str | None] = {
        "Host": f"127.0.0.1:{server.server_port}",
        "Origin": f"http://127.0.0.1:{server.server_port}",
        "Cookie": f"rft_{server.server_port}={server.token}",
        "Content-Type": "application/json",
        "Sec-Fetch-Site": "same-origin",
    }
    own |= {name.replace("_", "-"): value for name, value in headers.items()}
    link = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    link.request(
        method, path, body, {name: value for name, value in own.items() if value is not None}
    )
    return link.getresponse()


EXAMINE = json.dumps({"recipe": "grpo", "values": {}})


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/", None, 200),
        ("POST", "/api/fields", None, 200),
        ("POST", "/api/examine", EXAMINE, 200),
        ("POST", "/api/examine", json.dumps({"recipe": "grpo"}), 400),
        ("GET", "/etc/passwd", None, 404),
    ],
)
def test_it_answers_its_own_page(
    server: PageServer, method: str, path: str, body: str | None, status: int
) -> None:
    assert answered(server, method, path, body).status == status


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example:1"},
        {"Cookie": None},
        {"Cookie": "rft_1=guess; other=2"},
        {"Origin": "https://evil.example"},
        {"Origin": None},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
        {"Content_Type": "text/plain"},
        {"Content_Type": None},
    ],
    ids=str,
)
def test_it_answers_no_other_page_and_no_stranger(
    server: PageServer, headers: dict[str, str | None]
) -> None:
    assert answered(server, "POST", "/api/examine", EXAMINE, **headers).status == 403


def test_the_page_is_for_whoever_has_the_printed_address_and_its_cookie_for_no_script(
    server: PageServer,
) -> None:
    for path in ("/", "/?token=", "/?token=guess"):
        assert answered(server, "GET", path, Cookie=None, Origin=None).status == 403
    path = server.address.removeprefix(f"http://127.0.0.1:{server.server_port}")
    opened = answered(server, "GET", path, Cookie=None, Origin=None)
    given = opened.headers["Set-Cookie"]
    assert opened.status == 200 and "; HttpOnly; SameSite=Strict" in given
    assert (
        answered(server, "POST", "/api/examine", EXAMINE, Cookie=given.partition(";")[0]).status
        == 200
    )


@pytest.mark.parametrize("length", ["-1", "many", str(2**30)])
def test_a_length_that_nobody_sends_is_refused_and_not_waited_for(
    server: PageServer, length: str
) -> None:
    assert answered(server, "POST", "/api/fields", Content_Length=length).status == 404


def test_a_question_imports_nothing_and_asks_no_database(assets: Path, tmp_path: Path) -> None:
    """A start would import a reward, a workflow, an agent and an operator of the user's own, and
    make a table.
    """
    own = {name: tmp_path / f"{name}.py" for name in ("reward", "workflow", "agent", "operator")}
    for name, file in own.items():
        file.write_text(
            f"open({str(tmp_path / name)!r}, 'w')\ndef one(*given): ...\n", encoding="utf-8"
        )
    form = "{prompt_type: plaintext}"
    agent = (
        f"{{default_workflow_type: agent, workflow_args: {{agent: '{own['agent']}:one'}}, "
        f"format: {form}"
    )
    values = given(assets, tmp_path, "both", "grpo") | {
        "buffer.explorer_input.default_reward_fn_type": f"{own['reward']}:one",
        "buffer.explorer_input.default_workflow_type": f"{own['workflow']}:one",
        "buffer.explorer_input.eval_tasksets": f"[{agent}, path: {assets / 'eval.jsonl'}}}]",
        "data_processor.experience_pipeline.operators": f"[{{name: '{own['operator']}:one'}}]",
        "buffer.trainer_input.experience_buffer.storage_type": "sql",
        "buffer.trainer_input.experience_buffer.path": f"sqlite:///{tmp_path / 'made.db'}",
    }
    found = studio.examine("grpo", values)
    assert found["problems"] == []
    assert dict(line[:2] for line in found["plan"])["only at the start"] == studio.LEFT_OUT
    assert {path.name for path in tmp_path.iterdir()} == {file.name for file in own.values()}


def test_tasks_of_a_table_are_not_counted_by_a_question(assets: Path, tmp_path: Path) -> None:
    values = given(assets, tmp_path, "both", "grpo") | {
        f"{TASKSET}.storage_type": "sql",
        f"{TASKSET}.path": "tasks.db",
    }
    found = studio.examine("grpo", values)
    assert found["ready"] and dict(line[:2] for line in found["plan"])["checkpoint"].endswith(
        "so many steps"
    )


def test_a_port_that_is_taken_is_refused(
    server: PageServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert studio.main(["--port", str(server.server_port)]) == 2
    assert "--port" in capsys.readouterr().err
