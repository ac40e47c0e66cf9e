"""What rank processes do in test_torch_dist: megatron's own save and load of a real GPTModel."""

import hashlib
import multiprocessing
from pathlib import Path
from typing import Any

import torch
from jobs import gathered, part_of, policy_on
from rows import make_rows

from rft.algorithm.losses import token_loss


def saved(path: str, root: str, optimizer: bool = False, **layout: Any) -> dict[str, Any]:
    """Train a step, save with megatron; at rank 0 the weights as they were gathered, by name."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    multiprocessing.current_process()._config["daemon"] = False  # megatron starts writers
    with policy_on(path, **layout) as policy:
        policy.train_step(part_of(policy, make_rows(8)), token_loss("sft", {}), lambda: None)
        state: dict[str, Any] = {"model": policy.model[0].sharded_state_dict(), "iteration": 7}
        if optimizer:
            kind = {"distrib_optim_sharding_type": "fully_reshardable"}
            chain = policy.optimizer.chain
            state["optimizer"] = chain.sharded_state_dict(
                policy.model[0].sharded_state_dict(), metadata=kind
            )
        Path(root).mkdir(exist_ok=True)
        torch.distributed.barrier()
        dist_checkpointing.save(state, root)
        filesystem_async._results_queue = None  # ends megatron's manager process
        pieces = [
            (p.key, p.offset, p.shape, p.flat, p.tensor.detach().clone())
            for p in policy.snapshot().pieces
            if p.key.startswith(("exp_avg", "master")) and policy.mesh.world == 1
        ]
        return {"weights": gathered(policy), "pieces": pieces}


def loaded(path: str, root: str, **layout: Any) -> dict[str, str]:
    """Another model filled by megatron's loader from `root`;
    hashes of its gathered weights at rank 0.
    """
    from megatron.core import dist_checkpointing

    with policy_on(path, **layout) as policy:
        state = {"model": policy.model[0].sharded_state_dict()}
        found = dist_checkpointing.load(state, root)
        policy.model[0].load_state_dict(found["model"])
        return {name: digest(value) for name, value in gathered(policy).items()} | {
            "iteration": found["iteration"]
        }


def digest(value: torch.Tensor) -> str:
    data = value.detach().contiguous().view(torch.uint8).numpy().tobytes()
    return f"{value.dtype} {list(value.shape)} {hashlib.sha256(data).hexdigest()}"
