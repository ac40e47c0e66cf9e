"""`rft debug [--set NAME] [--row N] [experiment=NAME | --config FILE] [section.key=value ...]`: one
task, every token.

    row of a taskset ──► its workflow, on a real engine, with its reward
            ──► a table per experience, and experiences.jsonl

In: the command line of `rft train`; no trainer is started and nothing of the run is touched: logs
and experiences lie in a job directory of their own, `<name>_debug`. Out: for every token of every
experience its id, text, whether it is trained, the log-probability that the engine sampled it with
and the policy version that did. Exit codes are those of `rft train`.
"""

import argparse
import json
import queue
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec

from rft import config as configs
from rft import train
from rft.buffer.experience_file import line_of
from rft.buffer.store import DEBUGGED
from rft.config import Config, ConfigError
from rft.data.chat import load_tokenizer
from rft.data.taskset import Taskset, build_tasksets
from rft.ground.errors import refuse
from rft.ground.experience import Experience, Task, decode, encode
from rft.ground.process import adopt_orphans
from rft.run import launch, owners
from rft.run.stages import StageFailed
from rft.run.supervisor import Events, signals_as_events
from rft.tools import config as config_tool
from rft.tools import tables

WIDTH = 100  # of what is printed of a text


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="rft debug",
        usage=(
            "rft debug [--set NAME] [--row N] [experiment=NAME | "
            "--config FILE] [section.key=value ...]"
        ),
        description="Run one task through a live engine and print every token of it.",
        allow_abbrev=False,
    )
    parser.add_argument("--set", help="the taskset's name; default: the training set")
    parser.add_argument("--row", type=int, default=0, help="its row, from 0")
    options, words = parser.parse_known_args(argv)
    try:
        config = explored(train.prepared_stages(config_tool.composed(words)))
        task = chosen(config, options.set).at(options.row)
        experiences = attempt(config, task)
    except ConfigError as error:
        return refuse(error)
    except StageFailed as failure:
        print(f"rft: {failure}", file=sys.stderr)
        return failure.code
    print("\n".join(shown(config, task, experiences)))
    file = configs.job_dir(config) / DEBUGGED
    with file.open("ab") as lines:
        lines.writelines(map(line_of, experiences))
    print(f"\nadded to {file}")
    return 0


def explored(stages: list[Config]) -> Config:
    """The last stage that has tasks, under a name of its own, without a trainer."""
    config = next(
        (stage for stage in reversed(stages) if stage.buffer.explorer_input.taskset is not None),
        None,
    )
    if config is None:
        raise ConfigError("buffer.explorer_input.taskset: there is no task to run; set its path")
    return replace(config, name=f"{config.name}_debug", mode="bench")


def chosen(config: Config, name: str | None) -> Taskset:
    taskset, evaluations = build_tasksets(config.buffer, config.model, config.seed, None, 1)
    found = {one.name: one for one in (taskset, *evaluations) if one is not None}
    if name is not None and name not in found:
        raise ConfigError(configs.nearest(name, found, "--set"))
    return found[name] if name is not None else next(iter(found.values()))


def attempt(config: Config, task: Task) -> list[Experience]:
    """What the task's workflow returns, on an engine that is started for it."""
    import ray

    from rft.rollout.explorer import Explorer

    answers: list[bytes] = []
    events: Events = queue.SimpleQueue()
    adopt_orphans()
    with owners.held(config), signals_as_events(events):
        launch.main_log(owners.place(config), config.log.level)
        launch.StageRun(
            config,
            events,
            lambda explorer: answers.extend(ray.get(explorer.ask(Explorer.attempt, encode(task)))),
        ).run()
    return [decode(answer, Experience) for answer in answers]


def shown(config: Config, task: Task, experiences: list[Experience]) -> Iterator[str]:
    tokenizer = load_tokenizer(config.model)
    yield f"task {task.id}: workflow {task.workflow}, reward {task.reward}, truth {task.truth!r}"
    yield f"sampling {json.dumps(msgspec.to_builtins(task.sampling))}"
    for experience in experiences:
        told = f"experience {experience.sample}" + (
            f", turn {experience.turn}" if experience.turn else ""
        )
        yield ""
        yield (
            f"{told}: reward {experience.reward:g} ({experience.reward_outcome}), "
            f"{experience.prompt_length} + {experience.response_length} "
            f"tokens, stop: {experience.stop}"
        )
        yield from (
            f"  {name} = {value}"
            for name, value in {**experience.metrics, **experience.info}.items()
        )
        yield "  prompt " + shortened(tokenizer.decode(experience.prompt_ids))
        yield from table(experience, tokenizer)


def table(experience: Experience, tokenizer: Any) -> list[str]:
    """Return a line per token of the response, tokens of tools and users included."""
    rows, versions = [], experience.token_versions
    for place, token in enumerate(experience.response_ids):
        version = versions[place]
        row = {
            "#": str(place),
            "id": str(token),
            "trained": "yes" if experience.action_mask[place] else "no",
            "logprob": f"{experience.logprobs[place]:.4f}" if len(experience.logprobs) else "",
            "version": "" if version is None else str(version),
            "token": json.dumps(tokenizer.decode([token]), ensure_ascii=False),
        }
        if len(experience.token_rewards):
            row["reward"] = f"{experience.token_rewards[place]:g}"
        rows.append(row)
    return tables.table(rows).splitlines()


def shortened(text: str) -> str:
    quoted = json.dumps(text, ensure_ascii=False)
    return quoted if len(quoted) <= WIDTH else f"{quoted[: WIDTH // 2]} ... {quoted[-WIDTH // 2 :]}"
