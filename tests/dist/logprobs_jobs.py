"""Log-probabilities on real ranks: a small problem that both sides of the test can make, and what a
rank finds for it.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import numpy as np
import torch
from jobs import TIMEOUT_S, part_of, policy_on
from rows import make_rows
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rft.algorithm.losses import token_loss
from rft.config import ConfigError, MegatronConfig, ModelConfig
from rft.data.chat import load_tokenizer
from rft.data.updates import RowPacking
from rft.ground import device as devices
from rft.ground.experience import Completion, GenerateRequest
from rft.megatron import logprobs
from rft.megatron.mesh import Mesh
from rft.megatron.model import output_weight
from rft.trainer.speculation import SpeculationCheck

TOKENS, HIDDEN, ROWS = 14, 6, 48  # of the output layer, padding included


def problem(dtype: str, kept: str) -> dict[str, torch.Tensor]:
    """`kept`: all, some, none of the tokens are trained.

    The hidden states of the others are not even numbers.
    """
    rng = np.random.default_rng(3)
    trained = {
        "all": np.ones(TOKENS),
        "some": np.arange(TOKENS) % 3 == 1,
        "none": np.zeros(TOKENS),
    }[kept].astype(bool)
    hidden = rng.normal(size=(TOKENS, HIDDEN))
    hidden[~trained] = np.nan
    found = {
        "hidden": hidden,
        "weight": rng.normal(size=(ROWS, HIDDEN)) * 3,
        "temperature": rng.uniform(0.5, 1.5, TOKENS),
        "of_logprob": rng.normal(size=TOKENS),
        "of_entropy": rng.normal(size=TOKENS),
    }
    tensors = {
        name: torch.from_numpy(value).to(getattr(torch, dtype)) for name, value in found.items()
    }
    return tensors | {
        "labels": torch.from_numpy(rng.integers(0, 19, TOKENS)),
        "trained": torch.from_numpy(trained),
    }


@contextmanager
def tile_of(elements: int) -> Iterator[None]:
    """Tiles of so many elements, however few columns that makes."""
    before = logprobs.logit_columns
    logprobs.logit_columns = lambda device, tokens: elements // max(1, tokens)
    try:
        yield
    finally:
        logprobs.logit_columns = before


class Widest(TorchDispatchMode):
    """The largest number of elements of any result that is not
    of one of the shapes to leave out.
    """

    def __init__(self, leave_out: set[tuple[int, ...]]):
        super().__init__()
        self.leave_out = leave_out
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for value in tree_leaves(found):
            if isinstance(value, torch.Tensor) and tuple(value.shape) not in self.leave_out:
                self.elements = max(self.elements, value.numel())
        return found


def label_logprobs(
    dtype: str, kept: str, vocab: int, tile: int, tp: int = 1, sp: bool = False, mask: bool = True
) -> dict[str, Any]:
    """Values of all tokens, and the gradients of this rank's shards, of sum(u logprob + v entropy)
    over the trained.
    """
    device = devices.choose("cpu")
    mesh = Mesh(MegatronConfig(tp, 1, 1, sp), device, TIMEOUT_S)
    try:
        given = problem(dtype, kept)
        hidden = (
            given["hidden"]
            .chunk(tp if sp else 1)[mesh.tp_rank if sp else 0]
            .clone()
            .requires_grad_()
        )
        weight = given["weight"].chunk(tp)[mesh.tp_rank].clone().requires_grad_()
        widest = Widest({(ROWS // tp, HIDDEN), (HIDDEN, ROWS // tp)})
        with tile_of(tile), widest:
            found, entropy = logprobs.label_logprobs(
                hidden,
                weight,
                given["labels"],
                given["temperature"],
                vocab,
                mesh.tp_group,
                sp,
                given["trained"].nonzero().squeeze(1) if mask else None,
            )
            (given["of_logprob"] * found + given["of_entropy"] * entropy).sum().backward()
        return {
            "logprobs": found.detach().numpy(),
            "entropy": entropy.detach().numpy(),
            "hidden": hidden.grad.numpy(),
            "weight": weight.grad.numpy(),
            "widest": widest.elements,
        }
    finally:
        mesh.close()


def nowhere(vocab: int) -> str:
    """On a device without values: where the host would wait for one, torch raises."""
    mesh = Mesh(MegatronConfig(), devices.choose("cpu"), TIMEOUT_S)
    try:
        given = {name: value.to("meta") for name, value in problem("float32", "some").items()}
        trained = torch.zeros(3, dtype=torch.int64, device="meta")
        hidden, weight = given["hidden"].requires_grad_(), given["weight"].requires_grad_()
        found, entropy = logprobs.label_logprobs(
            hidden,
            weight,
            given["labels"],
            given["temperature"],
            vocab,
            mesh.tp_group,
            trained=trained,
        )
        (found + entropy).sum().backward()
        return str(weight.grad.device)
    finally:
        mesh.close()


def bf16(vocab: int, tile: int) -> dict[str, np.ndarray]:
    """One rank, bf16 hidden states and weights; everything else stays in fp32."""
    mesh = Mesh(MegatronConfig(), devices.choose("cpu"), TIMEOUT_S)
    try:
        given = problem("float32", "all")
        hidden, weight = (given[name].bfloat16().requires_grad_() for name in ("hidden", "weight"))
        with tile_of(tile):
            found, entropy = logprobs.label_logprobs(
                hidden, weight, given["labels"], given["temperature"], vocab, mesh.tp_group
            )
            (given["of_logprob"] * found + given["of_entropy"] * entropy).sum().backward()
        assert found.dtype == entropy.dtype == torch.float32
        assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
        return {
            "logprobs": found.detach().numpy(),
            "entropy": entropy.detach().numpy(),
            "hidden": hidden.grad.float().numpy(),
            "weight": weight.grad.float().numpy(),
        }
    finally:
        mesh.close()


class Logits(TorchDispatchMode):
    """The most elements that a product with rows of the output layer, transposed, gives: those
    products are logits.
    """

    def __init__(self, weight: torch.Tensor):
        super().__init__()
        self.memory = range(weight.data_ptr(), weight.data_ptr() + weight.nbytes)
        self.hidden = weight.shape[1]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if any(self.holds(given) and given.stride() == (1, self.hidden) for given in args):
            for value in tree_leaves(found):
                if not self.holds(value):
                    self.elements = max(self.elements, value.numel())
        return found

    def holds(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.data_ptr() in self.memory


def widest_of_a_step(path: str, tile: int, **layout: Any) -> dict[str, int]:
    """What a whole training step and a scoring make of logits on this rank."""
    with policy_on(path, **layout) as policy:
        part = part_of(policy, make_rows(12))
        if not policy.mesh.is_last_stage:
            policy.score(part)
            policy.train_step(part, token_loss("ppo", {}), lambda: None)
            return {}
        weight = output_weight(policy.model[-1])
        seen = Logits(weight)
        with tile_of(tile), seen:
            policy.score(part)
            policy.train_step(part, token_loss("ppo", {}), lambda: None)
        return {
            "elements": seen.elements,
            "tokens": max(packed.length for packed in part),
            "width": len(weight),
        }


class Engine:
    """Answers at random, with the log-probabilities that transformers gives the same weights, of
    which one may be `off`.
    """

    def __init__(self, path: str, off: float):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.off = off
        self.rng = np.random.default_rng(1)

    @torch.no_grad()
    def ask(self, version: int, requests: list[GenerateRequest]) -> list[Completion]:
        made = []
        for request in requests:
            tokens = self.rng.integers(5, 90, request.sampling.max_tokens).tolist()
            ids = torch.tensor([request.prompt + tokens])
            found = self.model(ids).logits[0, len(request.prompt) - 1 : -1].log_softmax(-1)
            told = found.gather(1, torch.tensor(tokens)[:, None]).squeeze(1).tolist()
            made.append(Completion(tokens=tokens, logprobs=told, versions=[], stop="length"))
        if len(made[-1].tokens) > 1:
            made[-1].logprobs[-1] += self.off
        return made


def compared(path: str, off: float, **layout: Any) -> str:
    """What the comparison with such an engine ends with, on this rank."""
    with policy_on(path, **layout) as policy:
        mesh, engine = policy.mesh, None
        if mesh.rank == 0:
            engine = Engine(path, off)
        tokenizer = load_tokenizer(ModelConfig(model_path=path)) if engine else None
        check = SpeculationCheck(
            "engine_args.speculative_config",
            mesh,
            policy,
            RowPacking(mesh.dp, 256, policy.multiple),
            128,
            engine.ask if engine else None,
            tokenizer.encode if tokenizer else None,
        )
        try:
            check(0)
        except ConfigError as error:
            return str(error)
        return ""


def checked(wrong: bool, tp: int = 1) -> str:
    """What the check of a policy that begins has to say; `wrong`: tiles forget the temperature."""
    mesh, tiles = Mesh(MegatronConfig(tp), devices.choose("cpu"), TIMEOUT_S), logprobs._tiles

    def cold(hidden: Any, weight: Any, temperature: Any, width: int) -> Any:
        return tiles(hidden, weight, torch.ones_like(temperature), width)

    try:
        with mock.patch.object(logprobs, "_tiles", cold) if wrong else nullcontext():
            logprobs.check_label_logprobs(mesh.tp_group, mesh.device.torch)
    except RuntimeError as error:
        return str(error)
    finally:
        mesh.close()
    return ""
