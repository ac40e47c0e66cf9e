"""Where a rank's batches come from: rows or experiences of a file, or what explorers put into a
buffer.

In: the config of a run. Out: the `Feed` of every rank; rank 0's has a source.
"""

from typing import Any

from rft.algorithm import ALGORITHMS, mixing
from rft.buffer.experience_file import ExperienceFile
from rft.config import Config, TrainerConfig
from rft.data.packing import Cost, Cut
from rft.data.supervised import SupervisedRows
from rft.ground.protocols import Mesh
from rft.trainer import control
from rft.trainer.feed import Feed, Source, is_supervised


def build_feed(config: Config, mesh: Mesh, policy: Any) -> Feed:
    """Collective: one on every rank."""
    lead = mesh.rank == 0
    return Feed(
        source(config) if lead else None,
        mesh,
        config.algorithm,
        int(config.trainer.max_token_len_per_gpu or 0) * mesh.cp,
        policy.multiple,
        Cost.of(policy.hf_config),
        cut_of(config.trainer),
        int(config.model.max_response_tokens or 1),
        experts(config) if lead else None,
    )


def cut_of(trainer: TrainerConfig) -> Cut:
    rows = None if trainer.use_dynamic_bsz else trainer.ppo_micro_batch_size_per_gpu
    return Cut(rows, trainer.balance_batch, pad=not trainer.use_remove_padding)


def source(config: Config) -> Source:
    """Rank 0's batches: supervised rows or experiences from a file, or what is in a buffer."""
    experience_buffer = config.buffer.trainer_input.experience_buffer
    if experience_buffer.storage_type == "file" and not is_supervised(config.algorithm):
        return ExperienceFile(
            str(experience_buffer.path), config.buffer.batch_size, config.trainer.total_steps
        )
    if experience_buffer.storage_type == "file":
        return SupervisedRows(
            experience_buffer,
            tokenizer_of(config),
            int(config.buffer.train_batch_size or 1),
            config.seed,
            int(config.model.max_model_len or 0),
            total_steps=config.trainer.total_steps,
            chat_template=config.model.custom_chat_template,
            schema=ALGORITHMS[config.algorithm.algorithm_type].schema,
        )
    controlled = config.algorithm.sample_strategy == "staleness_control"
    oldest = int(config.algorithm.sample_strategy_args["max_staleness"]) if controlled else None
    return control.QueueSource(
        control.actor(experience_buffer.name),
        experience_buffer.max_read_timeout,
        oldest,
    )


def experts(config: Config) -> Source | None:
    """Rank 0's expert rows, where the algorithm mixes them in: as
    many per step as the batch has room for.
    """
    if not mixing.is_mixed(config.algorithm):
        return None
    name = mixing.argument(config.algorithm, "sft_dataset_name")
    return SupervisedRows(
        config.buffer.trainer_input.auxiliary_buffers[name],
        tokenizer_of(config),
        mixing.expert_rows(config.algorithm, int(config.buffer.train_batch_size or 1)),
        config.seed,
        int(config.model.max_model_len or 0),
        chat_template=config.model.custom_chat_template,
        key_path=f"buffer.trainer_input.auxiliary_buffers.{name}",
        expert=True,
    )


def tokenizer_of(config: Config) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        config.model.model_path, trust_remote_code=config.model.trust_remote_code
    )
