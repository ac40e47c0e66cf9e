"""What the rank of test_silent_faults.py does: the real loop over real Megatron, saved and resumed,
beside a sampler that shares no line with it: transformers, filled from the buckets that engines
get. With one fault planted, or none.

    Trainer ── buckets of version n ──► Sampler (transformers): groups of answers, their
            log-probabilities ──► Feed ──► step ──► ... save ──► a second attempt resumes, goes on

In: a model directory, an empty directory and the name of a fault of `FAULTS`, or the number of a
mutation of `mutations`. Out: the gates that have warned, or what has refused to go on.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from rft.algorithm import credit
from rft.checkpoint.stager import Stager
from rft.config import SynchronizerConfig
from rft.data.runs import expanded
from rft.ground import device as devices
from rft.ground.experience import Batch, Experience, VersionSpan
from rft.ground.rounds import InFile, Round, TrainerInfo
from rft.megatron import model as models
from rft.megatron import network
from rft.megatron import rope as rotary
from rft.megatron.learner import Learner
from rft.megatron.policy import Policy
from rft.run import assembly
from rft.run.backends import MegatronBackend
from rft.run.recovery import Recovery
from rft.sync import plan as plans
from rft.sync.origins import packed
from rft.sync.publisher import Origin, Outcome, Publisher
from rft.sync.readers import HandedBuckets
from rft.tools.toy import write_arithmetic, write_model
from rft.trainer.models import Models
from tests.verify.mutations import MUTATIONS, plant

GROUPS, EACH, PROMPT, RESPONSE = 6, 8, 6, 8
TEMPERATURE = 0.7
SAVED, END = 3, 5  # steps: the first attempt ends with a save, the second goes on
BUCKET = 2**14  # bytes: most tensors are cut, some lie together


class Sampler:
    """A `feed.BatchSource`: answers of the newest version that was published. One response of each
    step has a reward that failed, as a timeout leaves it.
    """

    def __init__(self, path: str, root: str, seed: int):
        import transformers

        self.buckets = Path(root) / "buckets"

        self.model = transformers.AutoModelForCausalLM.from_pretrained(path).float().eval()
        self.rng = np.random.default_rng(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.version = -1

    def serve(self, version: int, weights: dict[str, torch.Tensor]) -> None:
        missing, unexpected = self.model.load_state_dict(weights, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
        self.version = version

    @torch.no_grad()
    def take(self, step: int) -> Batch:
        assert self.version == step, "the loop is synchronous"
        prompts = self.rng.integers(8, 60, (GROUPS, PROMPT)).repeat(EACH, axis=0)
        tokens, said = torch.tensor(prompts), []
        for _ in range(RESPONSE):
            logits = self.model(tokens).logits[:, -1] / TEMPERATURE
            logprobs = torch.log_softmax(logits, -1)
            chosen = torch.multinomial(logprobs.exp(), 1, generator=self.generator)
            said.append(logprobs.gather(1, chosen))
            tokens = torch.cat([tokens, chosen], 1)
        found, spoken = tokens.tolist(), torch.cat(said, 1).tolist()
        return Batch(
            step=step,
            experiences=[
                self._experience(step, at, *one)
                for at, one in enumerate(zip(found, spoken, strict=True))
            ],
        )

    def _experience(
        self, step: int, at: int, tokens: list[int], logprobs: list[float]
    ) -> Experience:
        answer = tokens[PROMPT:]
        return Experience(
            tokens=tokens,
            prompt_length=PROMPT,
            action_mask=[1] * RESPONSE,
            logprobs=logprobs,
            versions=[VersionSpan(version=step, start=0, end=RESPONSE)],
            temperature=TEMPERATURE,
            reward=0.0 if at == 5 else sum(token % 2 for token in answer) / RESPONSE,
            reward_outcome="timeout" if at == 5 else "ok",
            group=step * GROUPS + at // EACH,
            sample=at % EACH,
        )

    def consumed(self, step: int) -> None: ...
    def saved(self, step: int) -> None: ...
    def close(self) -> None: ...
    def retain(self, loop: dict[str, Any]) -> None: ...

    def wants_weights(self, interval: int) -> bool:
        return False

    def mark(self) -> int:
        return 0


class Direct(Origin):
    """Every version is served at once: in buckets in a file, as engines get them from memory, which
    a worker's reader checks and puts together.
    """

    def __init__(self, mesh: Any, policy: Policy, sampler: Sampler, file: Path):
        super().__init__(mesh, None, SynchronizerConfig(), 1)
        self.policy, self.sampler, self.file = policy, sampler, file
        self.plan = plans.build([policy.blocks()], BUCKET)
        self.worker = HandedBuckets(torch.device("cpu"))
        self.worker.connect(TrainerInfo(plan=plans.encode(self.plan), epoch=1, timeout=60.0))

    def connect(self) -> Outcome:
        return Outcome()

    def start(self, version: int, due: bool) -> None:
        told, at = [], 0
        with self.file.open("wb") as out:
            for data, digest in packed(self.plan, 0, self.policy, version):
                out.write(data)
                told.append((at, len(data), digest))
                at += len(data)
        location = InFile(path=str(self.file), streams=[told])
        coming = Round(version=version, epoch=1, digest=self.plan.digest, location=location)
        self.worker.check(coming)
        self.sampler.serve(version, self.worker.stage(coming))

    def outcome(self) -> Outcome:
        return Outcome()


class Backend(MegatronBackend):
    """Megatron's, with the sampler for engines."""

    sampler: Sampler

    def build_publisher(self, mesh: Any, models: Models, *_: Any) -> Publisher:
        return Publisher(Direct(mesh, models.policy, self.sampler, self.sampler.buckets))


# --- the faults: each wraps code of rft's own, for both attempts ----------------------------------


def _patched(owner: Any, name: str, wrapped: Callable[..., Any]) -> Any:
    """`wrapped(original, ...)` in place of it."""
    original = getattr(owner, name)
    return mock.patch.object(owner, name, lambda *given, **more: wrapped(original, *given, **more))


def stale_buffer() -> Any:
    """The largest tensor of a save is the one of the step before."""
    seen: dict[int, torch.Tensor] = {}

    def start(
        original: Any, stager: Any, identity: str, tensors: Any, *rest: Any, **more: Any
    ) -> Any:
        at = max(range(len(tensors)), key=lambda n: tensors[n].numel())
        stale = [*tensors]
        stale[at] = seen.get(at, tensors[at] * 0.99)
        seen[at] = tensors[at].clone()
        return original(stager, identity, stale, *rest, **more)

    return _patched(Stager, "start", start)


def swapped_rows() -> Any:
    """Two rows of the first layer's values, on their way to the engines."""

    def read(original: Any, policy: Policy) -> Iterator[torch.Tensor]:
        for block, tensor in zip(policy.blocks(), original(policy), strict=True):
            if block.name == "model.layers.0.self_attn.v_proj.weight":
                tensor = tensor[[1, 0, *range(2, len(tensor))]]
            yield tensor

    return _patched(Policy, "read_blocks", read)


def labels_off_by_one() -> Any:
    def micro(original: Any, net: Any, packed: Any, length: int) -> Any:
        return original(net, replace(packed, labels=np.roll(packed.labels, -1)), length)

    return _patched(network.Network, "_micro", micro)


def failed_reward_is_zero() -> Any:
    return mock.patch.object(credit, "scored", lambda experiences: experiences)


def dropped_microbatch() -> Any:
    def run(original: Any, net: Any, part: Any, use: Any, forward_only: bool) -> Any:
        return original(net, part if forward_only else [*part][:-1], use, forward_only)

    return _patched(network.Network, "_run", run)


def wrong_rope_base() -> Any:
    def rope(original: Any, hf: dict[str, Any]) -> dict[str, Any]:
        return original(hf) | {"rope_theta": 2 * original(hf)["rope_theta"]}

    return _patched(rotary, "rope_of", rope)


def shifted_mask() -> Any:
    def row(original: Any, *given: Any) -> Any:
        made = original(*given)
        weight = np.roll(expanded(made.weight), -1)
        return replace(made, trained=np.roll(made.trained, -1), weight=weight)

    return _patched(credit, "_row", row)


def head_not_tied() -> Any:
    """The output layer is a copy of the embedding, which learns alone."""
    copies: dict[int, torch.Tensor] = {}

    def weight(original: Any, model: Any) -> torch.Tensor:
        return copies.setdefault(id(model), original(model).detach().clone())

    return _patched(models, "output_weight", weight)


def lost_bias() -> Any:
    """A buffer of the router that its module would save, and no piece of a checkpoint is."""

    def init(original: Any, policy: Policy, *given: Any) -> None:
        original(policy, *given)
        router = policy.model[0].decoder.layers[0].mlp
        router.register_buffer("expert_bias", torch.zeros(4))

    def update(original: Any, policy: Policy, *given: Any) -> Any:
        policy.model[0].decoder.layers[0].mlp.expert_bias += 1e-3
        return original(policy, *given)

    stack = contextlib.ExitStack()
    stack.enter_context(_patched(Policy, "__init__", init))
    stack.enter_context(_patched(Policy, "update", update))
    return stack


def schedule_not_restored() -> Any:
    return mock.patch.object(Learner, "_restore_counters", lambda learner, data: None)


def wrong_temperature() -> Any:
    def micro(original: Any, net: Any, packed: Any, length: int) -> Any:
        return original(net, replace(packed, temperature=np.ones_like(packed.temperature)), length)

    return _patched(network.Network, "_micro", micro)


def one_seed_per_group() -> Any:
    def take(original: Any, sampler: Sampler, step: int) -> Batch:
        batch = original(sampler, step)
        made = batch.experiences
        for at, one in enumerate(made):
            first = made[at - at % EACH]
            one.tokens, one.logprobs = first.tokens, first.logprobs
        return batch

    return _patched(Sampler, "take", take)


FAULTS: dict[str, Callable[[], Any]] = {
    "a stale buffer in a save": stale_buffer,
    "a row of QKV swapped": swapped_rows,
    "off-by-one in labels": labels_off_by_one,
    "a zero reward for a failed sample": failed_reward_is_zero,
    "a dropped microbatch": dropped_microbatch,
    "wrong rope base": wrong_rope_base,
    "mask shifted": shifted_mask,
    "tied embedding not tied": head_not_tied,
    "expert bias lost": lost_bias,
    "LR schedule not restored": schedule_not_restored,
    "wrong temperature in log-probabilities": wrong_temperature,
    "one seed for a whole group": one_seed_per_group,
}


# --- the run --------------------------------------------------------------------------------------


def faults() -> list[str]:
    return list(FAULTS)


def planted() -> int:
    """All mutations, one over the other: raises where one cannot be."""
    for mutation in MUTATIONS:
        plant(mutation)
    return len(MUTATIONS)


def write(path: str, seed: int = 0, context: int = 256, head: int = 16) -> str:
    """A toy whose attention looks somewhere and whose answers differ: at transformers' scale of
    random weights (0.02) every model says the same.
    """
    from safetensors.torch import load_file, save_file

    sizes = {"hidden": 48, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": head, "ffn": 64}
    write_model(path, seed=seed, context=context, **sizes)
    file = Path(path) / "model.safetensors"
    weights = {
        name: tensor * (8.0 if tensor.ndim == 2 else 1.0)
        for name, tensor in load_file(file).items()
    }
    save_file(weights, file, metadata={"format": "pt"})
    return path


def drilled(path: str, root: str, fault: str = "", seed: int = 0) -> tuple[list[str], Any]:
    """The gates that have warned in two attempts, in order, and what the run ends with."""
    os.environ["RFT_LOG_DIR"] = root
    sampler, warned, end = Sampler(path, root, seed), [], None
    with FAULTS[fault]() if fault else contextlib.nullcontext():
        for epoch, steps in enumerate((SAVED, END), start=1):
            gates, end = attempt(path, root, sampler, epoch, steps, seed)
            warned += gates
    return warned, end


def mutated(path: str, root: str, number: int) -> tuple[list[str], Any]:
    """As `drilled`; what ends a run is no silent fault, and its error stands in the place of the
    gates.
    """
    plant(MUTATIONS[number])
    try:
        return drilled(path, root)
    except Exception as error:
        return [f"{type(error).__name__}: {error}".splitlines()[0]], None


def attempt(
    path: str, root: str, sampler: Sampler, epoch: int, steps: int, seed: int
) -> tuple[list[str], Any]:
    config = config_of(path, root, seed)
    config.trainer.total_steps = steps
    device = devices.choose("cpu")
    backend = Backend(config, Path(root), device)
    object.__setattr__(backend, "sampler", sampler)
    mesh = backend.open_mesh()
    try:
        models = backend.build_models(mesh)
        with mock.patch.object(assembly, "source", lambda *_: sampler):
            built = assembly.assemble(backend, mesh, models, epoch, lambda: False, Recovery())
        assert built.trainer.fit(built.start) == steps
        built.trainer.checkpoints.close()
        built.trainer.publisher.close()
        end = models.vitals()
        models.close()
        return sorted(built.trainer.gates.warned), end
    finally:
        mesh.close()


def config_of(path: str, root: str, seed: int) -> Any:
    from rft import config as configs
    from rft import train

    tasks, _ = write_arithmetic(root, num_eval=8)
    words = [
        "experiment=grpo",
        f"model.model_path={path}",
        f"checkpoint_root_dir={root}/runs",
        f"buffer.explorer_input.taskset.path={tasks}",
        "synchronizer.max_staleness=0",
        f"model.max_prompt_tokens={PROMPT}",
        f"model.max_response_tokens={RESPONSE}",
        f"algorithm.repeat_times={EACH}",
        f"buffer.batch_size={GROUPS}",
        "algorithm.optimizer.lr=3e-3",
        f"trainer.max_token_len_per_gpu={EACH * (PROMPT + RESPONSE)}",
        f"trainer.total_steps={END}",
        "trainer.save_hf_checkpoint=never",
        "monitor=none",
        "device=cpu",
        f"seed={seed}",
    ]
    [config] = train.prepared_stages(configs.compose(words))
    config.mode = "train"  # no explorer: the sampler is one
    return config
