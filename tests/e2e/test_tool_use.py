"""A run whose model uses a tool: two requests and a program per response, trained on as one dialogue."""

from pathlib import Path

import pytest

from rft.buffer.progress import Stored
from rft.experience import Experience, decode
from rft.tools.toy import character_tokenizer

from runs import LETTERS, REPEATS, REPOSITORY, TASKS, History, overrides, step_rows, train

pytestmark = pytest.mark.timeout(600)
TOLERANCE = 1e-4  # of a log-probability, engine against trainer, on equal weights in float32
WORKFLOW = f"{REPOSITORY / 'tests' / 'e2e' / 'calculator.py'}:Counted"


def test_what_the_tool_said_is_seen_and_not_trained(tmp_path: Path) -> None:
    from rft.tools.toy import write_arithmetic, write_model

    write_model(tmp_path / "assets" / "model", hidden=64, layers=2, heads=2, kv_heads=2, ffn=128, context=1200)
    write_arithmetic(tmp_path / "assets", digits=1, num_eval=16)
    more = [
        "trainer.total_steps=2", f"buffer.explorer_input.default_workflow_type={WORKFLOW}", "model.max_prompt_tokens=900",
        "model.max_model_len=1200", f"buffer.explorer_input.default_reward_fn_type={LETTERS}",
        "+buffer.explorer_input.taskset.workflow_args.limits.seconds=60",
    ]  # fmt: skip
    with train(*overrides(tmp_path, "tools", tmp_path / "assets", *more)) as run:
        assert (run.end(), run.errors()) == (0, "")
    job, tokenizer = tmp_path / "rft" / "tools", character_tokenizer()
    rows = step_rows(job)
    assert rows[0]["staleness/max"] == 0 and rows[0]["logprob_diff/max"] < TOLERANCE, (
        "the trainer sees the engine's own ids"
    )
    assert all(row["grad_norm"] > 0 and row["reward/failed_frac"] == 0 for row in rows)
    groups = [
        decode(record.experiences, list[Experience])
        for record in History(job / "buffer" / "experience_buffer").of(Stored)
    ]
    assert len(groups) >= 2 * TASKS
    for group in groups:
        assert [(e.sample, e.turn) for e in group] == [(number, 0) for number in range(REPEATS)]
        for made in group:
            assert made.metrics == {"turns": 2.0, "tools/calls": 1.0, "tools/failed": 0.0} | made.metrics
            foreign = [
                t for t, mask in zip(made.tokens[made.prompt_length :], made.action_mask, strict=True) if not mask
            ]
            own = [t for t, mask in zip(made.tokens[made.prompt_length :], made.action_mask, strict=True) if mask]
            heard = tokenizer.decode(foreign)
            first = made.action_mask.index(0)
            said = tokenizer.decode(own[:first], skip_special_tokens=True)
            assert f"<|tool|>{len(said)}\n<|end|><|assistant|>" in heard
            assert sum(span.end - span.start for span in made.versions) == len(own)
