"""What a commit loads again of a round in which some tensors did not change, in a real model of
vLLM: the layers of the others, and what they compute is what a whole load makes of it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rft.ground.protocols import Block
from rft.ground.rounds import Round, TrainerInfo
from rft.sync import plan as plans
from rft.sync.sender import WeightSender
from rft.tools.toy import write_model

pytestmark = pytest.mark.verify
WAIT_S = 60.0


class Weights:
    def __init__(self, directory: Path):
        self.tensors = load_file(directory / "model.safetensors")

    def blocks(self) -> list[Block]:
        return [
            Block(name, str(one.dtype).removeprefix("torch."), tuple(one.shape), 0, 0, len(one))
            for name, one in self.tensors.items()
        ]

    def read_blocks(self) -> Iterator[torch.Tensor]:
        return iter(self.tensors.values())


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    """Two of one shape with different random weights."""
    return [write_model(tmp_path / str(seed), seed=seed, context=64) for seed in (1, 2)]


@pytest.fixture
def engine(models: list[Path], monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM in this process, so that its model can be looked at."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM

    return LLM(
        str(models[0]),
        enforce_eager=True,
        max_model_len=64,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_num_seqs=2,
    )


class Stage:
    """A trainer, and the engine's worker that follows it."""

    def __init__(self, llm: Any, weights: Weights):
        from rft.sync.install import StreamedWeights

        runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        runner = runner.model_runner
        self.llm, self.model, self.source = llm, runner.model, weights
        self.worker = StreamedWeights(None, runner.vllm_config, torch.device("cpu"), self.model)
        self.sender = WeightSender(weights, 1, WAIT_S, full_interval=100)
        plan = plans.build([weights.blocks()], 2**14)
        self.sender.follow(plan, 0)
        info = TrainerInfo(
            plan=plans.encode(plan), streams=[self.sender.endpoint], epoch=1, timeout=WAIT_S
        )
        self.worker.receiver.connect(info)
        self.digest, self.version = plan.digest, 0

    def round(self) -> list[str]:
        """The weights as they are now; returns the kinds of layers that were loaded."""
        from rft.sync.install import UpdateInfo

        self.version += 1
        coming = Round(version=self.version, epoch=1, digest=self.digest, timeout=WAIT_S)
        self.sender.open(self.version)
        received = self.worker.stage(coming)
        self.sender.close_version()
        assert not received.error
        self.worker.receive_weights(UpdateInfo(coming))
        self.worker.finish_weight_update()
        chosen = self.worker.chosen
        return ["all"] if chosen is None else [type(layer).__name__ for layer in chosen.layers]

    def said(self) -> list[float]:
        from vllm import SamplingParams

        self.llm.reset_prefix_cache()
        (made,) = self.llm.generate(
            {"prompt_token_ids": list(range(5, 25))},
            SamplingParams(temperature=0, max_tokens=8, logprobs=1, detokenize=False),
            use_tqdm=False,
        )
        return [next(iter(one.values())).logprob for one in made.outputs[0].logprobs]

    def change(self, *words: str) -> None:
        for name, value in self.source.tensors.items():
            if any(word in name for word in words):
                value.view(-1)[::32] *= 3.0


def test_layers_in_which_nothing_changed_are_not_loaded(engine: Any, models: list[Path]) -> None:
    here = Stage(engine, Weights(models[1]))
    assert here.round() == ["all"]
    first = here.said()
    here.change("layers.0.")
    assert here.round() == ["all"], "which layer takes what is seen now"
    for words, layers in (
        (["layers.1.self_attn.q_proj"], ["QKVParallelLinear"]),
        (["layers.0.mlp.down_proj", "model.norm"], ["RowParallelLinear", "RMSNorm"]),
        (["nothing"], []),
        (["embed_tokens"], None),
    ):
        before = here.said()
        here.change(*words)
        loaded = here.round()
        assert "all" not in loaded and (layers is None or loaded == layers), words
        found = here.said()
        assert (found != before) == (words != ["nothing"])
        here.worker.receiver.changed = None
        assert here.round() == ["all"]
        assert here.said() == found, words
    assert found != first
