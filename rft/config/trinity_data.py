"""The data side of `rft.config.trinity`: keys of tasksets, of buffers and of adapters.

In: nothing. Out: rows for its table. Invariant: as there, no key is ignored.
"""

from typing import Any

from rft.config.buffer import TASKSET_KEY as TASKSET
from rft.config.foreign import ForeignKey

ITSELF = "Trinity-RFT sets it itself: leave it out"
QUEUE = "buffer.trainer_input.experience_buffer"
ADAPTER = "model.lora_configs"


def unless_sequential(selector: Any) -> bool:
    return selector not in (None, "sequential")


DATA: dict[str, ForeignKey] = {}
for _key in (TASKSET, QUEUE):
    DATA |= {
        f"{_key}.enable_progress_bar": ForeignKey(
            "F3", "rows are read before the first step, without a bar", takes_any=True
        ),
        f"{_key}.max_retry_times": ForeignKey(
            "F11", "a database is asked again while it is busy", takes_any=True
        ),
        f"{_key}.max_retry_interval": ForeignKey(
            "F11", "a database is asked again while it is busy", takes_any=True
        ),
        f"{_key}.index": ForeignKey("F3", "a resume finds its place by itself", only=(0,)),
        f"{_key}.batch_size": ForeignKey("F3", ITSELF, only=(0,)),
        f"{_key}.total_steps": ForeignKey("F4", "set buffer.total_steps"),
        f"{_key}.ray_namespace": ForeignKey("A4", "set ray_namespace"),
        f"{_key}.format.image_key": ForeignKey("F46", "images are not in rft yet", late=True),
        f"{_key}.format.video_key": ForeignKey("F46", "videos are not in rft yet", late=True),
        f"{_key}.format.reply_prefix": ForeignKey(
            "F39", "an answer begins where the chat template lets it begin: write it there"
        ),
        f"{_key}.format.enable_thinking": ForeignKey(
            "F45", "set model.enable_thinking, or write it into format.chat_template"
        ),
    }
for _word in ("selector_type", "seed", "feature_keys", "kwargs"):
    DATA[f"{TASKSET}.data_selector.{_word}"] = ForeignKey(
        "F30", to=f"{TASKSET}.task_selector.{_word}"
    )
DATA |= {
    f"{TASKSET}.is_eval": ForeignKey("F3", ITSELF, only=(False,)),
    f"{TASKSET}.total_epochs": ForeignKey("F3", "set buffer.total_epochs", only=(1,)),
    f"{QUEUE}.tokenizer_path": ForeignKey("F3", ITSELF),
    f"{QUEUE}.capacity": ForeignKey(
        "F22", "synchronizer.max_staleness bounds what waits for the trainer", takes_any=True
    ),
    f"{QUEUE}.data_selector.selector_type": ForeignKey(
        "F30", to=f"{QUEUE}.shuffle", convert=unless_sequential, only=("sequential", "shuffle")
    ),
    f"{QUEUE}.data_selector.seed": ForeignKey(
        "F30", "rows are shuffled by seed, which is the run's: set that", only=(42,)
    ),
    f"{QUEUE}.data_selector.feature_keys": ForeignKey("F30", "rows are shuffled", only=([],)),
    f"{QUEUE}.data_selector.kwargs": ForeignKey("F30", "rows are shuffled", only=({},)),
    f"{ADAPTER}.name": ForeignKey(
        "D9", "there is one adapter, and engines know it by its version", takes_any=True
    ),
    f"{ADAPTER}.path": ForeignKey(
        "D9", "an adapter begins as nothing: merge the old one into model.model_path first"
    ),
    f"{ADAPTER}.base_model_name": ForeignKey("D9", "it is model.model_path: leave it out"),
    f"{ADAPTER}.lora_dtype": ForeignKey("D9", "it is trainer.dtype", only=("auto",)),
    f"{ADAPTER}.exclude_modules": ForeignKey("D9", f"set {ADAPTER}[0].target_modules"),
    f"{ADAPTER}.is_dummy": ForeignKey("D9", ITSELF, only=(False,)),
}
