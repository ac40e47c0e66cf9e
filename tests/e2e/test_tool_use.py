"""A run whose model uses a tool, by a plug-in's workflow: two requests and a program per response,
one dialogue.
"""

from pathlib import Path

import pytest

from rft.buffer.progress import Stored
from rft.ground.experience import Experience, decode
from rft.tools.toy import character_tokenizer

from runs import LETTERS, REPEATS, REPOSITORY, TASKS, History, overrides, step_rows, train

# `test_agent_loop` and `test_resume_loop` have dialogues that go on after words which no model
# said.
pytestmark = [pytest.mark.verify, pytest.mark.timeout(600)]
TOLERANCE = 1e-4  # of a log-probability, engine against trainer, on equal weights in float32
PLUGIN = """
import sys
from pathlib import Path
from rft.ground.plugins import load_file, register

register("workflow", "counted")(load_file(Path({workflow!r})).Counted)
with open({mark!r}, "a") as file:
    print(Path(sys.argv[0]).name, file=file)
"""


def test_what_the_tool_said_is_seen_and_not_trained(tmp_path: Path) -> None:
    from rft.tools.toy import write_arithmetic, write_model

    write_model(
        tmp_path / "assets" / "model",
        hidden=64,
        layers=2,
        heads=2,
        kv_heads=2,
        ffn=128,
        context=1300,
    )
    write_arithmetic(tmp_path / "assets", digits=1, num_eval=16)
    (tmp_path / "plugins").mkdir()
    workflow, mark = str(REPOSITORY / "tests" / "e2e" / "calculator.py"), str(tmp_path / "loaded")
    (tmp_path / "plugins" / "mine.py").write_text(PLUGIN.format(workflow=workflow, mark=mark))
    more = [
        "trainer.total_steps=2",
        "buffer.explorer_input.default_workflow_type=counted",
        f"plugin_dirs=[{tmp_path / 'plugins'}]",
        "model.max_prompt_tokens=900",
        "model.max_response_tokens=150",
        "model.max_model_len=1300",
        f"buffer.explorer_input.default_reward_fn_type={LETTERS}",
        "+buffer.explorer_input.taskset.workflow_args.limits.seconds=60",
    ]
    with train(*overrides(tmp_path, "tools", tmp_path / "assets", *more)) as run:
        assert (run.end(), run.errors()) == (0, "")
    loaded = set(Path(mark).read_text().split())
    assert loaded >= {"train.py", "rank.py", "default_worker.py", "reward_worker.py"}, (
        "supervisor, rank, actors, rewards"
    )
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
    made = [experience for group in groups for experience in group]
    assert all(
        [(e.sample, e.turn) for e in group] == [(number, 0) for number in range(REPEATS)]
        for group in groups
    )
    assert all((e.metrics["tools/calls"], e.metrics["tools/failed"]) == (1.0, 0.0) for e in made)
    twice = [e for e in made if e.metrics["turns"] == 2]
    assert len(twice) > len(made) / 2, "the others were cut in their first turn"
    for one in twice:
        first = one.action_mask.tolist().index(0)
        response, sampled = one.tokens[one.prompt_length :], sum(one.action_mask)
        said = tokenizer.decode(response[:first], skip_special_tokens=True)
        heard = [token for token, mask in zip(response, one.action_mask, strict=True) if not mask]
        assert heard == tokenizer.encode(
            f"<|tool|>{len(said)}\n<|end|><|assistant|>", add_special_tokens=False
        )
        assert sum(span.end - span.start for span in one.versions) == sampled
