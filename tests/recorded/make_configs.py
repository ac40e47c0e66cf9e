"""Writes configs.json.xz: what every recipe means. `python -m tests.recorded.make_configs`, run at
8c2d7f2.

In: the words below. Out: for each list of words the composed config, as `rft config --all` has it,
and the stages that come of it, as their resolved.yaml has them, as plain data. `test_configs.py`
compares.
"""

import json
import lzma
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.recorded import entry

HERE = Path(__file__).parent
DATA = HERE / "configs.json.xz"
MODEL = "model.model_path=MODEL model.max_prompt_tokens=16 model.max_response_tokens=8"
TASKS, ROWS = "buffer.explorer_input.taskset", "buffer.trainer_input.experience_buffer"
GRPO = f"experiment=grpo {MODEL} {TASKS}.path=TRAIN"
SFT = f"experiment=sft {MODEL} {ROWS}.path=TRAIN"
MIX = (
    f"experiment=mix {MODEL} {TASKS}.path=TRAIN "
    "buffer.trainer_input.auxiliary_buffers.sft_dataset.path=TRAIN"
)
DPO = (
    f"experiment=dpo {MODEL} {ROWS}.path=TRAIN {ROWS}.format.chosen_key=response "
    f"{ROWS}.format.rejected_key=response"
)
TEACHER = "model.teacher_model_path=MODEL"
RECIPES = [
    GRPO,
    SFT,
    MIX,
    DPO,
    f"experiment=ppo {MODEL} {TASKS}.path=TRAIN",
    f"experiment=serve {MODEL}",
    f"experiment=tinker {MODEL} {TASKS}.path=TRAIN model.tinker.base_model=toy",
    "experiment=quickstart",
    "experiment=quickstart_moe",
    "experiment=quickstart debug=fast",
    *(f"{GRPO} algorithm={name}" for name in ("grpo", "ppo")),
    *(f"{MIX} algorithm={name}" for name in ("mix", "mix_chord")),
    *(f"{GRPO} {TEACHER} algorithm={name}" for name in ("on_policy_distill", "jsd")),
    f"{DPO} algorithm=dpo",
    f"{SFT} algorithm=sft",
    f"{SFT} algorithm=cpt {ROWS}.format.prompt_key=prompt",
    f"{GRPO} debug=fast",
    *(f"{GRPO} sweep={name}" for name in ("grid", "optuna")),
    *(f"{GRPO} monitor={name}" for name in ("tensorboard", "wandb", "mlflow", "none")),
]
UNFINISHED = [  # words that leave something out, which composes all the same
    "",
    "experiment=dpo",
    "experiment=grpo",
    "experiment=mix",
    "experiment=ppo",
    "experiment=serve",
    "experiment=sft",
    "experiment=tinker",
    *(
        f"algorithm={path.stem}"
        for path in sorted((HERE.parents[1] / "configs" / "algorithm").iterdir())
    ),
]


def found(words: str, root: Path, whole: bool) -> dict[str, Any]:
    """`whole`: the stages as well. Names stand for the paths of this machine."""
    given = [*words.split(), "device=cpu", "checkpoint_root_dir=ROOT/runs"]
    config = entry.composed([entry.placed(word, root) for word in given])
    parts: dict[str, Any] = {"composed": entry.as_data(config)}
    if whole:
        parts["stages"] = entry.prepared(config)
    return json.loads(entry.unplaced(json.dumps(parts), root))


def main() -> None:
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        root = Path(directory)
        entry.leave_the_machine(patch, root)
        entry.write_assets(root)
        everything = {words: found(words, root, whole=True) for words in RECIPES}
        everything |= {words: found(words, root, whole=False) for words in UNFINISHED}
    for path in (HERE.parents[1] / "configs").glob("*/*.yaml"):
        assert path.parent.name == "size" or any(  # newer than what is recorded
            f"{path.parent.name}={path.stem}" in words.split() for words in everything
        ), f"{path} is not recorded"
    DATA.write_bytes(lzma.compress(json.dumps(everything).encode(), preset=9))


if __name__ == "__main__":
    main()
