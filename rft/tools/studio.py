"""`rft studio [--port 8501] [plugin=DIRECTORY ...]`: a page on which a config is put together; it
says at every change what would be refused, and why.

    page ── recipe, values ──► examine
            ──► the file for `rft train --config`, problems by key, GPUs, memory

In: what the browser sends. Out: the page, its fields, and for a set of values what `rft train`,
`rft config` and `rft doctor` would say of them. Nothing is started, imported, asked or written, and
a recipe's `prepare` function is not called; plug-ins are those that were named when the server was
started, never of a request. Invariant: what the page calls ready is a file that
`rft train --config` takes, but for what it says is looked at only at a start.
"""

import argparse
import datetime
import functools
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rft import config as configs
from rft import preflight
from rft.config import TRAINING, Config, ConfigError
from rft.ground import hubs, plugins, redact
from rft.ground.errors import refuse, refuse_all
from rft.monitor.run_record import flat
from rft.tools import config as config_tool
from rft.tools import fit, local_page, studio_fields

PAGE = Path(__file__).with_name("studio.html")
RECIPES = ("grpo", "ppo", "sft")
LEFT_OUT = (
    "functions and operators of your own, databases, services, ports, isolation, "
    "whether checkpoint_root_dir can be written"
)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="rft studio", description="Put a config together in the browser."
    )
    parser.add_argument("--port", type=int, default=8501, help="0: any free one (default: 8501)")
    parser.add_argument(
        "plugins", nargs="*", metavar="plugin=DIRECTORY", help="plug-ins whose names are offered"
    )
    given = parser.parse_args(argv)
    try:
        plugins.load([directory_of(word) for word in given.plugins])
    except ConfigError as error:
        return refuse(error)
    return local_page.serve("rft studio", given.port, PAGE, ANSWERS)


def directory_of(word: str) -> str:
    key, _, directory = word.partition("=")
    if key != "plugin" or not directory:
        raise ConfigError(f"{word}: give plugin=DIRECTORY, once for each")
    return directory


def described() -> dict[str, Any]:
    return {
        "fields": [asdict(field) for field in studio_fields.fields()],
        "beginner": studio_fields.BEGINNER,
        "parts": list(studio_fields.PARTS),
        "visible": studio_fields.VISIBLE,
        "recipes": {name: plain_values(recipe(name)) for name in RECIPES},
    }


# --- one set of values ----------------------------------------------------------------------------


def examine(name: str, values: dict[str, str]) -> dict[str, Any]:
    """`values`: YAML text by key, only of keys that differ from the recipe `name`; an empty text
    takes a key back.

    Returns `yaml` (the file), `problems` as {key, said} in the order they were met, `ready`, `now`
    (the value of every key) and `plan`: GPUs and memory, as lines of (what, said, whether it fits).
    """
    problems: list[dict[str, str | None]] = []
    raw = recipe(name).copy()
    for key, text in values.items():
        try:
            put(raw, key, text)
        except ConfigError as error:
            problems += [{"key": key, "said": said} for said in error.problems]
    raw = configs.normalized(raw)
    unset = [
        key
        for key, value in sorted(flat(OmegaConf.to_container(raw, resolve=False)).items())
        if value == "???" and studio_fields.is_visible(key, plain_values(raw))
    ]
    problems += [{"key": key, "said": f"{key} is not set: give it a value"} for key in unset]
    config = None if problems else accepted(raw, problems)
    return {
        "yaml": config_tool.text(raw, everything=False, as_written=True),
        "problems": problems,
        "ready": not problems,
        "now": plain_values(raw),
        "plan": [list(line) for line in planned(raw, config)],
    }


@functools.cache
def recipe(name: str) -> DictConfig:
    """What experiment=<name> composes; callers change a copy."""
    if name not in RECIPES:
        raise ConfigError(configs.nearest(name, RECIPES, "experiment"))
    known = plugins.named()
    return configs.compose([f"experiment={name}", *([f"plugin_dirs={known}"] if known else [])])


def put(raw: DictConfig, key: str, text: str) -> None:
    """Set `key` to what `text` is as YAML; empty: back to what the schema says."""
    if key not in configs.leaf_keys():
        raise ConfigError(configs.unknown(key))
    try:
        value = default_of(key) if text == "" else yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{key}: {text!r} is no YAML: {str(error).splitlines()[0]}") from error
    if isinstance(value, datetime.date):  # as in a file: a name may be a day
        value = text
    refuse_all((*configs.problems_in(configs.nested(key, value)), *secrets_in(key, value)))
    try:
        OmegaConf.update(raw, key, value, merge=False)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{key}: {text!r}: {str(error).splitlines()[0]}") from error


def secrets_in(key: str, value: Any) -> Iterator[str]:
    """What the file would hold for everybody to read."""
    for name, one in value.items() if isinstance(value, dict) else ():
        if one and redact.is_secret_key(str(name)) and "${" not in str(one):
            yield f"{key}: {name} is a secret: give ${{oc.env:VARIABLE}}, with a variable's name"


def default_of(key: str) -> Any:
    return configs.get(configs.parsed(configs.nested(configs.TASKSET_KEY, {})), key)


def accepted(raw: DictConfig, problems: list[dict[str, str | None]]) -> Config | None:
    """The first stage, filled and checked as far as that runs nothing;
    everything that is refused is added to `problems`.
    """
    try:
        drafts = configs.stage_drafts(raw)
        preflight.prepare(drafts, at_start=False)
        return drafts[0].config
    except ConfigError as error:
        keys = configs.leaf_keys()
        problems += [
            {"key": studio_fields.searched(said, keys), "said": said} for said in error.problems
        ]
        return None


def planned(raw: DictConfig, config: Config | None) -> Iterator[tuple[str, str, bool]]:
    """GPUs as far as the numbers tell, and what ranks and engines
    hold as soon as everything is known.
    """
    yield from gpus(raw, config)
    if config is None:
        return
    yield "only at the start", LEFT_OUT, True
    if hubs.name_of(config.model.model_path, "model"):
        yield "model", f"{config.model.model_path} of a hub, which only a start asks", True
        return
    wanted = fit.plan(config)
    yield (
        "model",
        f"{fit.short(wanted.parameters)} parameters, {fit.short(wanted.trained)} trained",
        True,
    )
    if config.mode in TRAINING:
        ranks, batch = int(config.trainer.num_ranks or 1), int(config.buffer.train_batch_size or 1)
        copies = ranks // preflight.fewest_ranks(config.trainer.megatron) or 1
        even = "" if batch % copies == 0 else ", which does not divide: some ranks get one more"
        yield "batch", f"{batch} experiences a step over {copies} copies of the model{even}", True
        rank = fit.rank_memory(wanted, 0)
        yield "memory per rank", rank.said, True
        steps = f"{config.trainer.total_steps or 'so many'} steps"
        yield "checkpoint", f"{fit.gigabytes(wanted.checkpoint)} each, {steps}", True
    if config.mode != "train":
        yield "memory per engine worker", fit.gigabytes(wanted.engine), True


def gpus(raw: DictConfig, config: Config | None) -> Iterator[tuple[str, str, bool]]:
    per_node, nodes = raw.cluster.gpu_per_node, raw.cluster.node_num
    rollout = raw.explorer.rollout_model
    if not per_node:
        yield "GPUs", "cluster.gpu_per_node is not set: those that are found, or none", True
        return
    total = per_node * nodes
    engines = (rollout.engine_num or 1) * rollout.tensor_parallel_size
    engines = engines if raw.mode != "train" else 0
    left = total - (0 if raw.cluster.colocate else engines)
    shared = "the same" if raw.cluster.colocate else str(left)
    yield (
        "GPUs",
        f"{nodes} x {per_node} = {total}: {engines} for engines, {shared} for the trainer",
        left > 0,
    )
    if config is not None and raw.mode in TRAINING:
        layout = config.trainer.megatron
        cut = (
            f"tp{layout.tensor_model_parallel_size} pp{layout.pipeline_model_parallel_size} "
            f"cp{layout.context_parallel_size}"
        )
        yield "trainer ranks", f"{config.trainer.num_ranks}, {cut}", True


def plain_values(raw: DictConfig) -> dict[str, str]:
    """Every key's value as the text of YAML, as a field shows it; "" where it is not set."""
    found = {}
    for field in studio_fields.fields():
        section, _, word = field.key.rpartition(".")
        node = OmegaConf.select(raw, section) if section else raw
        try:
            is_unset = node is None or OmegaConf.is_missing(node, word)
            value = None if is_unset else OmegaConf.select(raw, field.key)
        except OmegaConfBaseException:  # of a variable that is not set here, as `accepted` says
            value = OmegaConf.to_container(node, resolve=False)[word]
        if OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=False)
        found[field.key] = "" if value is None else written(value)
    return found


def written(value: Any) -> str:
    return (
        yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()
    )


ANSWERS: local_page.Answers = {
    "/api/fields": lambda asked: described(),
    "/api/examine": lambda asked: examine(
        str(asked["recipe"]), {str(k): str(v) for k, v in asked["values"].items()}
    ),
}
