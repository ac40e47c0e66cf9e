"""A real vLLM engine on CPU: what it samples.

Transformers on the same weights is the judge of every log-probability.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import ray
import torch
from miniature import END, PROMPT, answer, ask, assert_sampled_from, judge, reference_logprobs

from rft.agents.endpoint.chat_format import answer_message, read
from rft.ground.experience import GenerateRequest, Sampling, encode
from rft.tools.toy import character_tokenizer

SEED = 7

# --- sampling -------------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_distribution_sampled_from(
    first_weights: Any, model_dirs: tuple[Path, Path]
) -> None:
    for made in answer(
        ask(first_weights, n=4, temperature=0.7, max_tokens=40, min_tokens=5, seed=3)
    ):
        assert made.stop in ("stop", "length")
        assert_sampled_from(model_dirs[0], made, 0.7, min_tokens=5)


def test_top_k_logprobs_are_renormalised(first_weights: Any, model_dirs: tuple[Path, Path]) -> None:
    one = answer(ask(first_weights, top_k=1, max_tokens=20, seed=3))[0]
    assert one.logprobs == pytest.approx([0.0] * len(one.tokens), abs=1e-6)
    two = answer(ask(first_weights, top_k=2, max_tokens=200, seed=3))[0]
    full = reference_logprobs(model_dirs[0], PROMPT, two.tokens, 1.0)
    assert all(torch.tensor(two.logprobs) > full + 0.1)


def test_greedy_takes_the_most_likely_token(
    first_weights: Any, model_dirs: tuple[Path, Path]
) -> None:
    made = answer(ask(first_weights, temperature=0.0, max_tokens=20))[0]
    with torch.no_grad():
        logits = judge(model_dirs[0])(torch.tensor([PROMPT + made.ids])).logits[
            0, len(PROMPT) - 1 : -1
        ]
    assert made.ids == logits.argmax(-1).tolist()
    assert_sampled_from(model_dirs[0], made, 1.0)


def test_samples_differ_and_a_seed_repeats_them(first_weights: Any) -> None:
    once = [made.ids for made in answer(ask(first_weights, n=4, max_tokens=30, seed=11))]
    again = [made.ids for made in answer(ask(first_weights, n=4, max_tokens=30, seed=11))]
    neighbour = [made.ids for made in answer(ask(first_weights, n=4, max_tokens=30, seed=12))]
    assert once == again
    assert len({tuple(tokens) for tokens in once + neighbour}) == 8


def test_a_response_ends_at_the_end_token(first_weights: Any) -> None:
    made = answer(ask(first_weights, n=16, max_tokens=500, seed=5))
    stopped = [one for one in made if one.stop == "stop"]
    assert stopped, "of 16 responses of a random model some meet the end token"
    assert all(one.tokens[-1] == END and END not in one.tokens[:-1] for one in stopped)


def test_a_stop_text_ends_a_response_with_all_its_tokens_told(
    first_weights: Any, model_dirs: tuple[Path, Path]
) -> None:
    all_ = answer(ask(first_weights, n=16, max_tokens=60, seed=SEED))
    longest = max(range(16), key=lambda number: len(all_[number].tokens))
    free, words = all_[longest], character_tokenizer()
    text = words.decode(free.ids[20:22])
    request = GenerateRequest(
        request_id="stop text",
        prompt=PROMPT,
        n=16,
        sampling=Sampling(max_tokens=60, seed=SEED),
        stop=[text],
    )
    made = answer(first_weights.generate.remote(encode(request)))[longest]
    assert made.stop == "stop" and words.decode(made.ids).endswith(text)
    assert words.decode(made.ids).count(text) == 1 and made.ids == free.ids[: len(made.tokens)]
    assert_sampled_from(model_dirs[0], made, 1.0)
    assert [(span.start, span.end) for span in made.versions] == [(0, len(made.tokens))]


def test_a_prompt_without_room_is_not_asked(engine: Any) -> None:
    made = answer(ask(engine, n=2, prompt=[9] * 1024))
    assert [one.stop for one in made] == ["prompt_too_long"] * 2 and made[0].ids == []
    last = answer(ask(engine, prompt=[9] * 1023, max_tokens=8))[0]
    assert len(last.tokens) == 1


def test_an_older_group_has_a_place_first(first_weights: Any) -> None:
    """Of requests that wait for one, whichever came first."""

    def asked(group: int, n: int, length: int) -> Any:
        sampling = Sampling(max_tokens=length, min_tokens=length)
        request = GenerateRequest(
            request_id=f"of {group}", prompt=PROMPT, n=n, sampling=sampling, group=group
        )
        return first_weights.generate.remote(encode(request))

    full, young, old = asked(0, 256, 40), asked(9, 200, 20), asked(2, 200, 20)
    assert ray.wait([young, old], timeout=120)[0] == [old]
    assert len(answer(young)) == 200 and len(answer(full)) == 256


def test_abort_returns_what_there_is(first_weights: Any) -> None:
    request = GenerateRequest(
        request_id="doomed", prompt=PROMPT, n=2, sampling=Sampling(max_tokens=900, min_tokens=900)
    )
    running = first_weights.generate.remote(encode(request))
    answer(ask(first_weights, max_tokens=5))  # meanwhile the other one has begun
    ray.get(first_weights.abort.remote("doomed"))
    made = answer(running)
    assert [one.stop for one in made] == ["abort", "abort"] and 0 < len(made[0].tokens) < 900


CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["ulm", "rom"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
FORM = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}


def test_an_answer_has_the_form_that_a_request_asks_for(first_weights: Any) -> None:
    """A random model would never say so by itself."""

    def said(**body: Any) -> list[str]:
        asked = read({"messages": [{"role": "user", "content": "?"}], **body}, Sampling())
        sampling = msgspec.structs.replace(asked.sampling, max_tokens=400, seed=SEED)
        request = GenerateRequest(
            request_id=f"form {len(str(body))}", prompt=PROMPT, n=4, sampling=sampling
        )
        made = answer(first_weights.generate.remote(encode(request)))
        assert all(one.stop == "stop" for one in made)
        assert all(number <= 0 for one in made for number in one.logprobs)
        words = character_tokenizer()
        return [words.decode(one.ids, skip_special_tokens=True) for one in made]

    for text in said(response_format=FORM):
        found = json.loads(text)
        assert found["city"] in ("ulm", "rom") and found["days"] in (1, 2, 3)
    one = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", one):
        for text in said(tools=TOOLS, tool_choice=choice, parallel_tool_calls=False):
            [call] = answer_message(text, True, "call")["tool_calls"]
            assert call["function"]["name"] == "weather"
            assert json.loads(call["function"]["arguments"])["city"] in ("ulm", "rom")


# --- life -----------------------------------------------------------------------------------------


def title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has ended
        return ""


def test_a_healthy_engine_does_not_end_its_watch(engine: Any) -> None:
    assert ray.wait([engine.watch.remote()], timeout=0.05)[0] == []
    facts = ray.get(engine.stats.remote())
    assert facts["name"] == "engine_0" and facts["poisoned"] is None and facts["active"] == 0


def test_an_engine_whose_core_stands_still_is_silent_until_it_goes_on(first_weights: Any) -> None:
    """The actor itself answers all the time. That core is asked in the order of its work."""
    answer(ask(first_weights, max_tokens=5))  # a first one may wait for what is compiled
    cores = [one for one in psutil.Process().children(recursive=True) if "EngineCore" in title(one)]
    for core in cores:
        core.suspend()
    try:
        while not ray.get(first_weights.is_silent.remote(), timeout=60):
            pass
    finally:
        for core in cores:
            core.resume()
    while ray.get(first_weights.is_silent.remote(), timeout=60):
        pass
    assert len(answer(ask(first_weights, max_tokens=5))[0].tokens) == 5


@pytest.mark.verify
def test_a_killed_engine_is_named_and_leaves_no_process(
    ray_session: None, model_dirs: tuple[Path, Path]
) -> None:
    from rft.config import ModelConfig, RolloutModelConfig
    from rft.ground.rounds import Round
    from rft.rollout.engine import EngineDied, RolloutEngine

    model = ModelConfig(model_path=str(model_dirs[0]))
    arguments = (
        "engine_1",
        model,
        RolloutModelConfig(dtype="fp32", kv_cache_gb=0.25, enforce_eager=True, max_num_seqs=256),
        1,
        0,
        "cpu",
        1024,
    )
    before = set(psutil.Process().children(recursive=True))
    doomed = ray.remote(RolloutEngine).options(max_concurrency=100).remote(*arguments)
    watched = doomed.watch.remote()
    ray.get(doomed.start.remote(), timeout=240)
    processes = [
        p
        for p in psutil.Process().children(recursive=True)
        if p not in before and "VLLM" in p.name()
    ]
    running = ask(doomed, max_tokens=900, min_tokens=900)
    answer(ask(doomed, max_tokens=5))
    processes[0].kill()
    with pytest.raises(RuntimeError, match="engine_1: EngineCore was killed by SIGKILL"):
        ray.get(watched, timeout=20)
    with pytest.raises(EngineDied, match="engine_1, generate: ") as told:
        ray.get(running, timeout=20)
    assert "vllm" not in type(told.value.cause).__module__
    with pytest.raises(EngineDied, match="engine_1, commit: ") as told:
        ray.get(doomed.commit.remote(Round(version=1)), timeout=20)
    # whoever asks would load all of vLLM for the type of its error
    assert "vllm" not in type(told.value.cause).__module__
    ray.get(doomed.shutdown.remote(), timeout=20)
    assert psutil.wait_procs(processes, timeout=20)[1] == []
