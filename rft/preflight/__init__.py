"""Fill what the user left out and refuse what cannot run, before anything expensive starts.

In: stages' configs as they were composed. Out: the same configs with every derived value set, or
one `ConfigError` of everything that cannot work, each sentence with its key and the fix. Reads
config.json, the tokenizer's files and the task files; loads neither torch nor megatron nor vllm.

    fill.py      what the user left out        inputs*.py  rules that look at models, files, ports
    rules*.py    rules over several keys       (of single keys: types and bounds in `rft.config`)
"""

from rft.config import Config, Draft
from rft.config.derived import variables_of_rewards
from rft.ground import surroundings
from rft.ground.errors import after, refuse_all
from rft.preflight import (
    inputs_data,
    inputs_hubs,
    inputs_models,
    rules_data,
    rules_machine,
    rules_run,
    rules_trainer,
)
from rft.preflight.fill import fewest_ranks as fewest_ranks
from rft.preflight.fill import fill_config
from rft.preflight.rules import Refusals, Rule, of_taskset

# keys of files that a recipe's `prepare` writes, and those whose values may name the user's parts
WRITTEN = (inputs_models.MODEL, f"{rules_data.TASKSET}.path", f"{rules_data.BUFFER}.path")
NAMING = ("algorithm", rules_data.TASKSET, "data_processor")


def checks(at_start: bool) -> tuple[Rule, ...]:
    """Every rule after those whose keys it builds on."""
    return (
        *inputs_models.MODELS,
        *rules_trainer.TINKER_FILLED,
        *rules_trainer.ALGORITHM,
        *rules_trainer.PROFILER,
        *rules_trainer.PRECISION,
        *rules_trainer.CHECKPOINT,
        *rules_data.TASKSETS,
        *rules_data.BATCHES,
        *rules_data.BUFFERS,
        *rules_data.PIPELINES,
        *rules_run.DEVICES,
        *rules_run.SYNC,
        *rules_run.EXPLORER,
        *rules_run.ENGINES,
        *rules_run.MONITOR,
        *inputs_models.BESIDE_POLICY,
        *inputs_data.rules(at_start),
        *inputs_models.MEMORY_AND_CARDS,
        *((*inputs_models.PLACES, *rules_machine.MACHINE) if at_start else ()),
        *rules_trainer.STEPS,
    )


def fill(config: Config) -> Config:
    """Set every value that follows from others; the user's own value always wins.

    Changes and returns `config`; raises ConfigError for what cannot be derived.
    """
    refusals = Refusals()
    fill_config(config, refusals)
    refuse_all(refusals.sentences())
    return config


def check(config: Config, at_start: bool = True) -> None:
    """Refuse a filled config that cannot work.

    `at_start`: also what a look at a config must not do: import the user's own functions, ask
    databases and services, begin a program, try directories and ports.
    """
    refusals = Refusals()
    refusals.ask(checks(at_start), config)
    refuse_all(refusals.sentences())


def prepare(drafts: list[Draft], at_start: bool = True) -> None:
    """Fill and check all stages, and refuse everything that cannot work at once, after what could
    not even be read; `at_start` as in `check`.
    """
    told, later = {}, {}
    pins = inputs_hubs.noted([draft.config for draft in drafts]) if at_start else {}
    for number, draft in enumerate(drafts):
        refusals = Refusals([of_taskset(key) for key in draft.refused])
        if at_start:
            refusals.ask(rules_machine.GIVEN, draft.config)
        fill_config(draft.config, refusals, asks_ray=at_start)
        if at_start:  # also what is tried below is a foreign process
            explorer = draft.config.explorer
            programs = [*explorer.env_vars, *explorer.passed_variables]
            surroundings.pass_on(programs, variables_of_rewards(draft.config))
        later[number] = inputs_hubs.look_up(draft.config, refusals, pins, at_start)
        refusals.ask(checks(at_start), draft.config)
        told[number] = refusals.sentences()
    if not any(told.values()) and not any(draft.problems for draft in drafts):
        told = {number: _large(drafts[number].config, later[number]) for number in told}
    everywhere = set.intersection(*map(set, told.values()))
    problems = [problem.sentence for draft in drafts for problem in draft.problems]
    for number, sentences in told.items():
        stage = f"{drafts[number].config.stage_name}: "
        problems += [one if one in everywhere else after(stage, one) for one in sentences]
    refuse_all(problems)


def _large(config: Config, commits: dict[str, str]) -> list[str]:
    """What is refused of data that is only fetched when nothing else is."""
    if not commits:
        return []
    refusals = Refusals()
    config.commits |= commits
    refusals.ask((*inputs_data.rules(at_start=True), *rules_trainer.STEPS), config)
    return refusals.sentences()
