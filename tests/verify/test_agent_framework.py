"""A real agent framework, openai-agents, against the endpoint: its tool loop, and a run that it
trains. It is as it comes.
"""

import asyncio
import importlib.util
import os
import sys
from pathlib import Path

import pytest
from test_agent_loop import ROOM, TOLERANCE, experiences

from rft.ground.experience import Sampling, Task
from tests.unit.scripted import TOKENIZER, Pool, listening
from tests.unit.test_endpoint import TOOLS, exact

from runs import REPEATS, REPOSITORY, overrides, step_rows, train, write_assets

FRAMEWORK = Path(sys.prefix) / "agents"
FILE = REPOSITORY / "tests" / "verify" / "framework_agent.py"
STEPS = 2

pytestmark = [
    pytest.mark.verify,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not FRAMEWORK.is_dir(),
        reason="`make verify` fetches it, as pinned in requirements/agents.txt",
    ),
]


def test_its_tool_loop_is_one_sequence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs the tool that the model calls, and every answer
    goes on from the ids of the one before.
    """
    monkeypatch.syspath_prepend(FRAMEWORK)
    specification = importlib.util.spec_from_file_location("framework_agent", FILE)
    assert specification and specification.loader
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    call = '<tool_call>{"name": "weather", "arguments": {"town":   "Bern"}}</tool_call>'

    async def scenario() -> None:
        pool = Pool(lambda prompt, n: "it is dry" if "dry in Bern" in prompt else "I ask. " + call)
        async with asyncio.timeout(60), listening(pool, tmp_path, template=TOOLS) as endpoint:
            session = endpoint.registry.open()
            task = Task(id="t", taskset="t", row=0, prompt="rain?", sampling=Sampling())
            await module.agent(
                task,
                endpoint.base_url(session.id),
                endpoint.registry.key(session.id),
                max_tokens=200,
            )
            [one] = session.experiences()
            exact(one, pool)
            assert len(session.calls) == 3
            said = TOKENIZER.decode(one.tokens)
            assert (
                f"<|assistant|>I ask. {call}<|end|><|user|>t:dry in Bern<|end|><|assistant|>it is "
                "dry<|end|><|user|>sure?" in said
            )

    asyncio.run(scenario())


def test_it_trains_the_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FRAMEWORK), *sys.path]))
    assets = write_assets(tmp_path / "assets")
    arguments = overrides(
        tmp_path,
        "framework",
        assets,
        *ROOM,
        "buffer.explorer_input.default_workflow_type=agent",
        f"+buffer.explorer_input.taskset.workflow_args.agent={FILE}:agent",
        f"trainer.total_steps={STEPS}",
    )
    with train(*arguments) as run:
        assert (run.end(), run.errors()) == (0, "")
    job = tmp_path / "rft" / "framework"
    rows = step_rows(job)
    assert len(rows) == STEPS and all(row["grad_norm"] > 0 for row in rows)
    assert max(row["logprob_diff/max"] for row in rows if row["staleness/max"] == 0) < TOLERANCE
    for group in experiences(job):
        assert len(group) == REPEATS and {one.metrics["turns"] for one in group} == {2.0}
