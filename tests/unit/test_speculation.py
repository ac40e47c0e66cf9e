"""Engines that speculate: who may, what they are asked, and which answers end the run."""

from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from rft.config import to_config
from rft.config.engine_arguments import COMPARED, speculation
from rft.ground.experience import Completion
from rft.preflight.rules import Refusals
from rft.preflight.rules_run import ENGINES
from rft.trainer.speculation import NOISE, TEXTS, judged, row_of, texts

KEY = "explorer.rollout_model.engine_args.speculative_config"
NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}
HEALTHY = [0.0, 1e-6, -1e-6] * 100


def refused(mode: str, **explorer: Any) -> list[str]:
    given = {"name": "run", "mode": mode, "model": {"model_path": "/m"}, "explorer": explorer}
    refusals = Refusals()
    refusals.ask(ENGINES, to_config(OmegaConf.create(given)))
    return refusals.sentences()


@pytest.mark.parametrize("mode", ["both", "train", "explore", "bench", "serve"])
def test_speculation_wants_a_trainer_in_the_same_run(mode: str) -> None:
    found = refused(mode, rollout_model={"engine_args": NGRAM})
    if mode in ("both", "train"):
        assert found == []
    else:
        (sentence,) = found
        assert sentence.startswith(f"{KEY} with mode={mode}: there is no trainer here")


def test_nobody_compares_what_a_judge_tells() -> None:
    judge = {"name": "judge", "model_path": "/judge", "engine_args": NGRAM}
    (sentence,) = refused("both", auxiliary_models=[judge])
    assert sentence.startswith("explorer.auxiliary_models.0.engine_args.speculative_config is ref")


@pytest.mark.parametrize("name", COMPARED)
def test_every_argument_that_turns_it_on_is_seen(name: str) -> None:
    assert speculation({"block_size": 16, name: {"method": "ngram"}}) == name
    assert speculation({"block_size": 16, name: None}) is None


@pytest.mark.parametrize("wrong", [0.002, -3.0, float("nan"), float("-inf")])
def test_one_wrong_token_among_many_is_enough(wrong: float) -> None:
    sentence = judged(KEY, [*HEALTHY, wrong], HEALTHY)
    assert sentence.startswith(f"{KEY}: ") and sentence.endswith(f"leave {KEY} out")
    assert "1 of them by more than 1.0e-03" in sentence


def test_equal_up_to_rounding_is_told_and_let_go(capsys: pytest.CaptureFixture[str]) -> None:
    assert judged(KEY, [*HEALTHY, 9e-4], HEALTHY) == ""
    assert capsys.readouterr().out.startswith(f"speculation: {KEY}: the engines'")


def test_noise_that_engines_have_without_speculation_is_theirs() -> None:
    """In bfloat16 a healthy engine is off by hundredths."""
    noise = [0.02, -0.01] * 50
    assert judged(KEY, [0.9 * NOISE * 0.02, *noise], noise) == ""
    assert "1 of them by more than 8.0e-02" in judged(KEY, [1.1 * NOISE * 0.02, *noise], noise)
    assert judged(KEY, HEALTHY, [float("nan")]), "noise without a bound excuses nothing"


def test_what_was_sampled_is_what_is_scored() -> None:
    row = row_of([5, 6, 7], Completion(tokens=[8, 9], logprobs=[-1, -2], versions=[], stop="stop"))
    assert row.tokens.tolist() == [5, 6, 7, 8, 9]
    assert row.trained.tolist() == row.weight.tolist() == [0, 0, 0, 1, 1]
    np.testing.assert_array_equal(row.behaviour, [0, 0, 0, -1, -2])
    with pytest.raises(ValueError, match="with none: prompt_too_long"):
        row_of([5], Completion(tokens=[], logprobs=[], versions=[], stop="prompt_too_long"))


def test_prompts_repeat_themselves() -> None:
    assert len(set(texts())) == TEXTS
    for text in texts():
        assert text == text[: len(text) // 6] * 6
