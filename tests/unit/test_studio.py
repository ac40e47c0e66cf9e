"""The config studio: what it calls ready is a file that `rft train --config` takes, and what it refuses names its key."""

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
        "model.model_path": str(assets / "model"), "model.max_prompt_tokens": "16", "model.max_response_tokens": "8",
        "checkpoint_root_dir": str(root / "runs"), "name": "made", "mode": mode, "device": "cpu", "buffer.batch_size": "8",
    }  # fmt: skip
    if recipe == "sft":
        data = "buffer.trainer_input.experience_buffer"
        return values | {f"{data}.path": str(assets / "train.jsonl"), "buffer.train_batch_size": "8"}
    if mode == "bench":
        one = f"{{name: held_out, path: {assets / 'eval.jsonl'}, format: {{prompt_type: plaintext}}}}"
        values["buffer.explorer_input.eval_tasksets"] = f"[{one}]"
    return values | {f"{TASKSET}.path": str(assets / "train.jsonl")}


CASES = [(recipe, mode) for recipe in ("grpo", "ppo") for mode in ("both", "explore", "train", "bench")]


@pytest.mark.parametrize(("recipe", "mode"), [*CASES, ("sft", "train")])
def test_what_is_ready_is_a_file_that_train_takes(assets: Path, tmp_path: Path, recipe: str, mode: str) -> None:
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
    assert {problem["key"] for problem in found["problems"]} == {"model.model_path", f"{TASKSET}.path"}
    assert not found["ready"]


@pytest.mark.parametrize(
    ("key", "text", "fix"),
    [
        ("buffer.batch_size", "many", "Integer"), ("buffer.batch_size", "0", "greater than 0"),
        ("algorithm.kl_loss_fn", "k9", "k3"), ("model.max_prompt_tokens", "900", "context"),
        ("buffer.explorer_input.eval_tasksets", "[{", "no YAML"), ("trainer.totl_steps", "1", "trainer.total_steps"),
        (f"{TASKSET}.path", "nowhere.jsonl", "does not exist"), ("model.model_path", "nowhere", "model.model_path"),
    ],
)  # fmt: skip
def test_a_problem_stands_at_its_key(assets: Path, tmp_path: Path, key: str, text: str, fix: str) -> None:
    found = studio.examine("grpo", given(assets, tmp_path, "both", "grpo") | {key: text})
    (problem,) = found["problems"]
    assert fix in problem["said"]
    assert problem["key"] in (key, "model.max_model_len")
    assert not (tmp_path / "runs").exists(), "a question leaves nothing behind"


def test_the_gpus_and_the_memory_are_those_of_the_config(assets: Path, tmp_path: Path) -> None:
    values = given(assets, tmp_path, "both", "grpo") | {"device": "cuda", "cluster.gpu_per_node": "8"}
    more = {"explorer.rollout_model.engine_num": "2", "trainer.megatron.tensor_model_parallel_size": "2"}
    plan = {what: said for what, said, _ in studio.examine("grpo", values | more)["plan"]}
    assert plan["GPUs"] == "1 x 8 = 8: 2 for engines, 6 for the trainer"
    assert plan["trainer ranks"] == "6, tp2 pp1 cp1"
    assert plan["batch"].startswith("64 experiences a step over 3 copies of the model, which does not divide")
    assert "weights" in plan["memory per rank"]
    found = studio.examine("grpo", values | {"explorer.rollout_model.engine_num": "8"})
    assert found["plan"][0][2] is False, "nothing is left for the trainer"
    assert found["problems"][0]["key"] in ("explorer.rollout_model.engine_num", "cluster.node_num")


def test_every_key_of_the_schema_has_one_place() -> None:
    keys = [field.key for field in studio_fields.fields()]
    assert len(set(keys)) == len(keys)
    assert set(configs.leaf_keys()) - {TASKSET} - set(studio_fields.NOT_SET_HERE) == set(keys)
    assert {field.part for field in studio_fields.fields()} == set(studio_fields.PARTS)
    shown = [key for part in studio_fields.BEGINNER.values() for key in part]
    assert len(set(shown)) == len(shown) and set(shown) <= set(keys)
    for start, other, _ in studio_fields.VISIBLE:
        assert other in keys and any(key.startswith(start) for key in keys), f"{start} or {other} is no key"


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
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("method", "path", "body", "host", "status"),
    [
        ("GET", "/", None, "127.0.0.1:1", 200), ("POST", "/api/fields", None, "localhost:1", 200),
        ("POST", "/api/examine", {"recipe": "grpo", "values": {}}, "127.0.0.1:1", 200),
        ("POST", "/api/examine", {"recipe": "grpo"}, "127.0.0.1:1", 400),
        ("POST", "/api/examine", {"recipe": "grpo", "values": {}}, "evil.example:1", 403),
        ("GET", "/etc/passwd", None, "127.0.0.1:1", 404),
    ],
)  # fmt: skip
def test_it_answers_its_own_page_only(
    server: PageServer, method: str, path: str, body: dict[str, object] | None, host: str, status: int
) -> None:
    link = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    link.request(method, path, None if body is None else json.dumps(body), {"Host": host})
    assert link.getresponse().status == status
    link.close()


def test_a_port_that_is_taken_is_refused(server: PageServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert studio.main(["--port", str(server.server_port)]) == 2
    assert "--port" in capsys.readouterr().err
