"""The policy where a service trains it: rft computes the loss, the service the model's gradient and
its update.

    part ─► datums ─► forward ─► log-probabilities ─► rft's own loss, its derivative d
            ─► forward_backward(cross_entropy, -d)
         ─► [the loop waits for whoever still reads the weights] ─► optim_step

The service's cross entropy is sum_t -weight_t * logprob_t, so with the weights -dL/dlogprob_t its
gradient is that of rft's loss L: every loss of `rft.algorithm.losses` works, with global weights
and metrics as with Megatron. In: packed microbatches. Out: metrics; paths of saved weights.
Invariants: the learning rate is that of `step`, the number of updates tried so far; weights of one
step are saved once, however often they are asked for.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rft.algorithm.fields import Fields
from rft.config import ModelConfig, OptimizerConfig
from rft.data.packing import Packed, Stacked
from rft.data.wire import Microbatches, encode_part
from rft.extras.tinker.service import Service
from rft.ground.names import read_hf_config
from rft.megatron.schedule import learning_rate
from rft.megatron.totals import Totals

if TYPE_CHECKING:
    from tinker import Datum

    from rft.algorithm.fields import TokenLoss

log = logging.getLogger(__name__)
# of what a loss may look at: the service gives log-probabilities of single tokens only
LACKING = ("entropy",)
GRAD_NORM = "unclipped_grad_l2:mean"  # what Tinker's optim_step calls it


class LocalMesh:
    """One process in the place of a mesh: `rft.ground.protocols.TrainerMesh`."""

    rank = tp_rank = cp_rank = 0
    world = dp = tp = cp = 1
    is_last_stage = True

    def broadcast(self, item: Any) -> Any:
        return item

    def gather(self, item: Any) -> list[Any]:
        return [item]

    def scatter_parts(self, parts: "Sequence[list[Stacked]] | None") -> Microbatches:
        assert parts is not None and len(parts) == 1
        return Microbatches(encode_part(parts[0]))

    def reduce(self, sums: Any, maxima: Any) -> None:
        """They are whole already."""

    def barrier(self, name: str) -> None:
        """Nobody else is waited for."""

    def close(self) -> None:
        """Nothing is held."""


class RemotePolicy:
    """What `rft.trainer.models.Models` asks of a policy. `open` comes before the first step."""

    lora = None  # of Megatron's kind
    multiple = 1

    def __init__(
        self,
        service: Service,
        model: ModelConfig,
        optimizer: OptimizerConfig,
        grad_clip: float,
        mesh: LocalMesh,
        seed: int,
        total_steps: int | None,
    ):
        self.service = service
        self.config = model.tinker
        self.optimizer = optimizer
        self.grad_clip = grad_clip
        self.mesh = mesh
        self.seed = seed
        self.total_steps = total_steps
        self.hf_config = read_hf_config(model.model_path)
        self.step = 0
        self._saves: dict[tuple[str, int], Future[str]] = {}  # of weights by (kind, step)
        self._tries: Counter[tuple[str, int]] = Counter()
        self._training: Any = None

    def describe(self) -> str:
        return (
            f"{self.config.base_model} with an adapter of rank {self.config.rank}, trained by a "
            "Tinker service"
        )

    def vitals(self) -> dict[str, Any]:
        """The weights are the service's."""
        return {"step": self.step}

    def begin(self) -> None:
        """That is `open`'s."""

    def open(self, step: int = 0, state: str | None = None) -> None:
        """Begin with a new adapter, or go on from saved weights and
        optimizer as they were at `step`.
        """
        config, client = self.config, self.service.client
        if state is None:
            request = client.create_lora_training_client(
                str(config.base_model),
                rank=config.rank,
                seed=self.seed if config.seed is None else config.seed,
                train_mlp=config.train_mlp,
                train_attn=config.train_attn,
                train_unembed=config.train_unembed,
            )
            self._training = self.service.answer(
                request, f"making an adapter on {config.base_model}"
            )
        else:
            request = client.create_training_client_from_state_with_optimizer(state)
            self._training = self.service.answer(request, f"going on from {state}")
        self.step = step

    def score(self, part: Sequence[Packed], trained_only: bool = False) -> list[np.ndarray]:
        """The log-probability of every label, one array [T] per microbatch."""
        given = list(datums(part))
        if not given:  # the client refuses to ask about nothing
            return aligned(part, [])
        request = self._training.forward(given, "cross_entropy")
        outputs = self.service.answer(request, "forward").loss_fn_outputs
        return aligned(part, [output["logprobs"].to_numpy() for output in outputs])

    def train_step(
        self,
        part: Sequence[Packed],
        token_loss: "TokenLoss",
        before_update: Callable[[], None],
        last: bool = True,
    ) -> dict[str, float]:
        """One optimizer update; `before_update` is called before weights change. `last`: of its
        training step.

        One that is not finite, or that no token is trained in, changes none.
        """
        metrics, weights = self._derived(part, self.score(part), token_loss)
        finite = bool(
            np.isfinite(metrics["loss"]) and all(np.isfinite(values).all() for values in weights)
        )
        before_update()
        rate = learning_rate(self.step, self.optimizer, self.total_steps)
        norm = {"grad_norm": 0.0 if finite else float("nan")}
        if finite and metrics["num_tokens"]:
            norm = self._update(part, weights, rate)
        self.step += last
        return metrics | norm | {"lr": rate, "skipped": float(not finite)}

    def _derived(
        self, part: Sequence[Packed], logprobs: list[np.ndarray], token_loss: "TokenLoss"
    ) -> tuple[dict[str, float], list[np.ndarray]]:
        """The loss's metrics, and for every token minus its derivative by the token's
        log-probability.
        """
        totals, weights = Totals(token_loss, counts=True, lacking=LACKING), []
        for packed, values in zip(part, logprobs, strict=True):
            scores = torch.from_numpy(values).requires_grad_()
            totals.add(scores, Fields.of(packed, torch.from_numpy)).backward()
            assert scores.grad is not None
            weights.append(-scores.grad.numpy())
        return totals.reduce(self.mesh), weights  # type: ignore[arg-type]

    def _update(
        self, part: Sequence[Packed], weights: list[np.ndarray], rate: float
    ) -> dict[str, float]:
        """Both requests are sent at once: the service does them in their order, without a turn
        between them.
        """
        from tinker import AdamParams

        config = self.optimizer
        params = AdamParams(
            learning_rate=rate,
            beta1=config.betas[0],
            beta2=config.betas[1],
            eps=config.eps,
            weight_decay=config.weight_decay,
            grad_clip_norm=self.grad_clip,
        )
        gradient = self._training.forward_backward(list(datums(part, weights)), "cross_entropy")
        update = self._training.optim_step(params)
        self.service.answer(gradient, "forward_backward")
        metrics = self.service.answer(update, "optim_step").metrics or {}
        return {"grad_norm": float(metrics[GRAD_NORM])} if GRAD_NORM in metrics else {}

    def saved(self, kind: str, step: int) -> "Future[str]":
        """The path of weights and optimizer (`state`), or of weights that can be sampled from
        (`sampler`), as they are at `step`, which is now, once the service has saved them: begun
        once, and again where it failed.
        """
        known = self._saves.get((kind, step))
        if known is not None and not (step == self.step and has_failed(known)):
            return known
        assert step == self.step, f"the weights of step {step} are gone: this is step {self.step}"
        save = (
            self._training.save_state
            if kind == "state"
            else self._training.save_weights_for_sampler
        )
        self._tries[kind, step] += 1
        tries = self._tries[kind, step]
        # what failed here may have been saved there, under the name that it had
        name = f"step_{step:08d}" + (f"-{tries}" if tries > 1 else "")
        self._saves[kind, step] = path = Future()
        save(name).future().add_done_callback(lambda done: _hand_on(done, path))
        return path

    def known(self, kind: str, step: int, path: str) -> None:
        """What an earlier attempt has saved."""
        self._saves[kind, step] = Future()
        self._saves[kind, step].set_result(path)

    def samplers(self) -> list[int]:
        """Steps whose weights can be sampled from."""
        return [
            step
            for (kind, step), path in self._saves.items()
            if kind == "sampler" and path.done() and not has_failed(path)
        ]

    def forget(self, kind: str, step: int) -> None:
        """Delete what was saved."""
        self.service.delete(self._saves.pop((kind, step)).result())

    def close(self) -> None:
        self.service.close()


class RemoteReference:
    """The model that the adapter began on, as the service samples it: a frozen judge of tokens."""

    def __init__(self, service: Service):
        self.service = service
        base = service.client.create_sampling_client(base_model=str(service.config.base_model))
        self._sampling = service.answer(base, "opening the reference model")

    def score(self, part: Sequence[Packed], trained_only: bool = False) -> list[np.ndarray]:
        from tinker import ModelInput

        requests = [
            self._sampling.compute_logprobs(ModelInput.from_ints(ids.tolist()))
            for ids, _ in sequences(part)
        ]
        logprobs = [
            self.service.answer(one, "the reference's log-probabilities") for one in requests
        ]
        return aligned(part, [np.array(one[1:], dtype=np.float32) for one in logprobs])

    def close(self) -> None:
        """The session is the policy's."""


def sequences(part: Sequence[Packed]) -> Iterator[tuple[np.ndarray, tuple[int, slice]]]:
    """Ids of every sequence, and where its predicted tokens lie: the
    microbatch, and a slice of its arrays.
    """
    for number, packed in enumerate(part):
        for start, stop in zip(
            packed.cu_seqlens[:-1].tolist(), packed.cu_seqlens[1:].tolist(), strict=True
        ):
            yield packed.tokens[start:stop], (number, slice(start, stop - 1))


def datums(part: Sequence[Packed], weights: list[np.ndarray] | None = None) -> "Iterator[Datum]":
    """One per sequence, in order: all tokens but the last as
    input, all but the first as targets.
    """
    from tinker import Datum, ModelInput, TensorData

    for ids, (number, where) in sequences(part):
        if (warm := part[number].temperature[where]).size and (warm != 1).any():
            raise ValueError(
                f"an experience was sampled at temperature {warm[warm != 1][0]:g}: a Tinker "
                "service gives log-probabilities at 1 "
                "only; set rollout_args.temperature=1, and sample so in workflows of your own"
            )
        token_weights = (
            np.zeros(len(ids) - 1, dtype=np.float32) if weights is None else weights[number][where]
        )
        yield Datum(
            model_input=ModelInput.from_ints(ids[:-1].tolist()),
            loss_fn_inputs={
                "target_tokens": TensorData.from_numpy(ids[1:]),
                "weights": TensorData.from_numpy(token_weights),
            },
        )


def aligned(part: Sequence[Packed], found: list[np.ndarray]) -> list[np.ndarray]:
    """What was told of every sequence, in the places of its microbatch; 0 elsewhere."""
    arrays = [np.zeros(packed.length, dtype=np.float32) for packed in part]
    for values, (_, (number, where)) in zip(found, sequences(part), strict=True):
        arrays[number][where] = values
    return arrays


def has_failed(path: "Future[str]") -> bool:
    return path.done() and path.exception() is not None


def _hand_on(done: "Future[Any]", path: "Future[str]") -> None:
    error = done.exception()
    if error is not None:
        path.set_exception(error)
    else:
        path.set_result(done.result().path)
