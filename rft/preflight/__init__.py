"""Fill what the user left out and refuse what cannot run, before anything expensive starts.

In: stages' configs as they were composed. Out: the same configs with every derived value set, or
one `ConfigError` of everything that cannot work, each sentence with its key and the fix. Reads
config.json, the tokenizer's files and the task files; loads neither torch nor megatron nor vllm.

    fill.py      what the user left out        inputs*.py  rules that look at models, files, ports
    rules*.py    rules over several keys       (of single keys: types and bounds in `rft.config`)
"""

from rft.config import Config
from rft.ground.errors import refuse_all
from rft.preflight import inputs_data, inputs_models, rules_data, rules_run, rules_trainer
from rft.preflight.fill import fewest_ranks as fewest_ranks
from rft.preflight.fill import fill_config
from rft.preflight.rules import Refusals, Rule


def checks(at_start: bool) -> tuple[Rule, ...]:
    """Every rule after those whose keys it builds on."""
    return (
        *inputs_models.MODELS,
        *rules_trainer.TINKER_FILLED,
        *rules_trainer.ALGORITHM,
        *rules_trainer.PROFILER,
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
        *(inputs_models.PLACES if at_start else ()),
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


def prepare(stages: list[Config], at_start: bool = True) -> None:
    """Fill and check all stages, and refuse everything that cannot work at once; `at_start` as in
    `check`.
    """
    told = {}
    for number, config in enumerate(stages):
        refusals = Refusals()
        fill_config(config, refusals)
        refusals.ask(checks(at_start), config)
        told[number] = refusals.sentences()
    everywhere = set.intersection(*map(set, told.values()))
    refuse_all(
        sentence if sentence in everywhere else f"{stages[number].stage_name}: {sentence}"
        for number, sentences in told.items()
        for sentence in sentences
    )
