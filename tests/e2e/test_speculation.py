"""A whole run whose engines speculate, on vLLM's CPU build, whose log-probabilities are then wrong:
it ends before its first step, in one line.
"""

from pathlib import Path

import pytest

from runs import is_one_line, overrides, step_rows, train, write_assets

KEY = "explorer.rollout_model.engine_args"
NGRAM = "{method:ngram,num_speculative_tokens:4,prompt_lookup_min:1,prompt_lookup_max:3}"

pytestmark = [pytest.mark.timeout(600), pytest.mark.verify]


def test_an_engine_that_tells_wrong_log_probabilities_trains_nobody(tmp_path: Path) -> None:
    """In small: `tests/unit/test_speculation.py`, and on ranks `tests/dist/test_logprobs.py`."""
    command = overrides(
        tmp_path,
        "speculation",
        write_assets(tmp_path),
        "model.max_prompt_tokens=96",
        "model.max_response_tokens=64",
        "trainer.total_steps=1",
        f"+{KEY}.speculative_config={NGRAM}",
    )
    with train(*command) as run:
        code, errors = run.end(timeout=400), run.errors()
    wanted = f"{KEY}.speculative_config: the engines' log-probabilities of ", "leave "
    assert code and is_one_line(errors, *wanted), errors
    job = tmp_path / "rft" / "speculation"
    assert len(list((job / "logs").glob("attempt_*"))) == 1, "another start would end alike"
    assert not (job / "metrics.jsonl").exists() or not step_rows(job)
