"""The table values.tsv, a row for each pair of key and value, and what the code of today makes of
such a pair.

Columns: the base (a list of words that the key has a meaning with), the key, the value as Hydra
reads it, `accepted`, `refused` or `crashed`, and behind it the value that the config then has (as
JSON; nothing for the items of lists), or the sentence.
"""

import csv
import json
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from tests.recorded import entry

DATA = Path(__file__).parent / "values.tsv"
TASKS, ROWS = "buffer.explorer_input", "buffer.trainer_input.experience_buffer"
_MODEL = (
    "model.model_path=MODEL checkpoint_root_dir=ROOT/runs model.max_prompt_tokens=16 "
    "model.max_response_tokens=8 device=cpu"
)
_GRPO = f"experiment=grpo {_MODEL} {TASKS}.taskset.path=TRAIN"
BASES = {
    "grpo": _GRPO,
    "ppo": f"experiment=ppo {_MODEL} {TASKS}.taskset.path=TRAIN buffer.batch_size=64",
    "sft": f"experiment=sft {_MODEL} {ROWS}.path=TRAIN",
    "mix": (
        f"experiment=mix {_MODEL} {TASKS}.taskset.path=TRAIN "
        "buffer.trainer_input.auxiliary_buffers.sft_dataset.path=TRAIN"
    ),
    "tinker": f"experiment=tinker {_MODEL} {TASKS}.taskset.path=TRAIN model.tinker.base_model=toy",
    "replay": f"{_GRPO} {ROWS}.replay_buffer.enable=true",
    "wsd": f"{_GRPO} algorithm.optimizer.lr_scheduler_type=wsd",
    "recompute": f"{_GRPO} trainer.recompute_granularity=full",
    "correction": (
        f"{_GRPO} algorithm.rollout_correction.rollout_is=token "
        "algorithm.rollout_correction.rollout_rs=token"
    ),
    "async": f"{_GRPO} synchronizer.sync_style=fully_async",
    "rows_first": f"experiment=sft {_MODEL} {ROWS}.path=ROOT/made.jsonl "
    "data_processor.task_pipeline.inputs=[TRAIN] "
    "data_processor.task_pipeline.operators=[{name:length_filter,args:{field:prompt}}]",
}
ITEMS = {  # of lists: what else an item has to have
    "model.lora_configs": {},
    "explorer.auxiliary_models": {"name": "judge", "model_path": "MODEL"},
    f"{TASKS}.eval_tasksets": {"path": "EVAL", "format": "{prompt_type:plaintext}"},
    "data_processor.experience_pipeline.operators": {"name": "reward_filter"},
    "data_processor.task_pipeline.operators": {"name": "length_filter", "args": "{field:prompt}"},
}


@dataclass(frozen=True)
class Row:
    base: str
    key: str
    value: str
    verdict: str = ""
    text: str = ""

    @property
    def words(self) -> list[str]:
        """Of a command line.

        The key of an item is LIST[].KEY, one that the config has not yet begins with a plus.
        """
        if "[]." not in self.key:
            return [*BASES[self.base].split(), f"{self.key}={self.value}"]
        place, _, inner = self.key.partition("[].")
        items = ",".join(
            f"{name}:{value}" for name, value in {**ITEMS[place], inner: self.value}.items()
        )
        return [*BASES[self.base].split(), f"{place}=[{{{items}}}]"]

    @property
    def name(self) -> str:
        """What a message calls the key."""
        return self.key.lstrip("+").replace("[]", "")


def read() -> list[Row]:
    with DATA.open(encoding="utf-8", newline="") as file:
        return [Row(*line) for line in csv.reader(file, dialect=csv.excel_tab)]


def write(rows: list[Row]) -> None:
    with DATA.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, dialect=csv.excel_tab, lineterminator="\n").writerows(map(astuple, rows))


def judged(row: Row, root: Path) -> Row:
    """The row as it comes out today."""
    entry.clear(root)
    try:
        config = entry.composed([entry.placed(word, root) for word in row.words])
        entry.check(config)
    except entry.Refused as error:
        return _with(row, "refused", entry.unplaced(str(error), root))
    # a traceback instead of a sentence: a finding, not an end of the table
    except Exception as error:
        return _with(row, "crashed", type(error).__name__)
    value = "" if "[]." in row.key else json.dumps(_at(entry.as_data(config), row.name))
    return _with(row, "accepted", entry.unplaced(value, root))


def _with(row: Row, verdict: str, text: str) -> Row:
    return Row(row.base, row.key, row.value, verdict, text)


def _at(config: Any, key: str) -> Any:
    for word in key.split("."):
        config = config[word]
    return config
