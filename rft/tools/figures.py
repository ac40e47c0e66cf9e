"""What `rft plan` knows of machines and of models that are not here.

In: a card's name, or this machine. Out: `Figures` of one rank, and config.json of published models.
Those of cards are the vendor's, for dense bf16: memory bandwidth and links out of NVIDIA's data
sheets (A100 80GB, H100 SXM, H200, H20, HGX B200, L40S; per direction, half of what they call
NVLink's or PCIe's bandwidth), TFLOP/s as in `rft.ground.device`, memory in MiB as `nvidia-smi`
tells it; the network is what nodes are sold with, an adapter per card: 200 Gbit/s beside A100 and
L40S, 400 beside the others. How much of a peak
training reaches is an assumption (REACHED): with it an 8B to 70B model comes to 40 to 50 % of the
peak, as Megatron-LM publishes for H100. Figures of this machine are measured (`measured`), in a few
seconds, and kept in the user's cache. Loads no torch but in the processes that measure.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft.config import ConfigError
from rft.ground.device import PEAK_TFLOPS, thread_environment
from rft.ground.durable import put

REACHED = 0.6  # of a card's peak, in products of large matrices and in attention
STREAMED = 0.8  # of a memory's bandwidth, and of a link's
ADAM_BYTES = 30  # read and written for each parameter of an update
MEASURE_S = 120.0  # torch loads in 10 s where others compute too
TRIES = 9  # the median counts
MOST_GAIN = 4.0  # of a product 512 wide over one 64 wide: more is noise
AROUND = 3e-4  # seconds of Megatron's code and of gloo's threads around a message, on a CPU
FORM = 5  # of the file


@dataclass(frozen=True)
class Figures:
    """Of one rank and the links it has; bytes, seconds and FLOP/s."""

    name: str
    memory: float  # of a card; 0: the host's is all there is
    peak: float  # FLOP/s that MFU is told of; 0: not known
    products: float  # FLOP/s that products of large matrices reach
    half_width: float  # columns of a shard with which they reach half of that
    attention: float  # FLOP/s
    stream: float  # bytes/s of what is not a product
    update: float  # seconds of the optimizer for a parameter
    launch: float  # of one operation
    near: float  # bytes/s that a rank sends inside its node
    far: float  # to another node
    message: float  # seconds before the first byte is there
    cores: int = 0  # that all ranks share; 0: each has a card

    @property
    def on_cpu(self) -> bool:
        return self.cores > 0


def card(name: str, full: str, mib: int, tbs: float, link: float, net: float) -> Figures:
    """`link`, `net`: GB/s in one direction, inside a node and out of it."""
    peak = PEAK_TFLOPS[full] * 1e12
    return Figures(
        name=name,
        memory=mib * 2.0**20,
        peak=peak,
        products=REACHED * peak,
        half_width=128,
        attention=0.5 * REACHED * peak,  # FlashAttention: half of what products reach, backward too
        stream=STREAMED * tbs * 1e12,
        update=ADAM_BYTES / (STREAMED * tbs * 1e12),
        launch=4e-6,
        near=STREAMED * link * 1e9,
        far=STREAMED * net * 1e9,
        message=2e-5,
    )


CARDS = {
    one.name: one
    for one in (
        card("a100", "NVIDIA A100", 81920, 2.039, 300, 25),
        card("h100", "NVIDIA H100", 81559, 3.35, 450, 50),
        card("h200", "NVIDIA H200", 143771, 4.8, 450, 50),
        card("h800", "NVIDIA H800", 81559, 3.35, 200, 50),
        card("h20", "NVIDIA H20", 97871, 4.0, 450, 50),
        card("b200", "NVIDIA B200", 183359, 8.0, 900, 50),
        card("l40s", "NVIDIA L40S", 46068, 0.864, 32, 25),
    )
}


def of_card(name: str) -> Figures:
    """By a short name, or by that which the driver gives ("NVIDIA H100 80GB HBM3")."""
    words = name.lower().replace("-", " ").split()
    if found := next((CARDS[word] for word in words if word in CARDS), None):
        return found
    raise ConfigError(
        f"--cards {name}: of this card no figures are known; use one of {', '.join(CARDS)}"
    )


# --- models ---------------------------------------------------------------------------------------


def _dense(hidden: int, layers: int, heads: int, ffn: int, vocab: int, **more: Any) -> Any:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": vocab,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    } | more


def _experts(hidden: int, layers: int, heads: int, ffn: int, wide: int) -> Any:
    more = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": wide,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    }
    return _dense(hidden, layers, heads, ffn, 151936, **more)


_LLAMA = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 131072}
SHAPES: dict[str, dict[str, Any]] = {  # what of each published config.json decides sizes
    "Qwen/Qwen3-0.6B": _dense(1024, 28, 16, 3072, 151936, tie_word_embeddings=True),
    "Qwen/Qwen3-8B": _dense(4096, 36, 32, 12288, 151936),
    "meta-llama/Llama-3.1-70B": _dense(8192, 80, 64, 28672, 128256, **_LLAMA),
    "Qwen/Qwen3-30B-A3B": _experts(2048, 48, 32, 6144, 768),
    "Qwen/Qwen3-235B-A22B": _experts(4096, 94, 64, 12288, 1536),
}
SIZES = {  # how the recipes of configs/size begin
    "qwen3_0_6b": "Qwen/Qwen3-0.6B",
    "qwen3_8b": "Qwen/Qwen3-8B",
    "llama3_70b": "meta-llama/Llama-3.1-70B",
    "qwen3_30b_a3b": "Qwen/Qwen3-30B-A3B",
    "qwen3_235b_a22b": "Qwen/Qwen3-235B-A22B",
}


# --- this machine ---------------------------------------------------------------------------------


def measured(dtype: str, threads: int, cores: int, again: bool = False) -> Figures:
    """Of one rank of this machine while every core computes; from the cache unless `again`."""
    file = cache()
    key = f"{socket.gethostname()} {cores} cores, {threads} threads, {dtype}, form {FORM}"
    known = remembered(file)
    if again or key not in known:
        known[key] = _measure(dtype, threads, cores)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            put(file, json.dumps(known, indent=1))
        except OSError as error:
            said = f"{file} cannot be written ({error.strerror}): the next plan measures again"
            print(f"rft plan: {said}; XDG_CACHE_HOME names another place", file=sys.stderr)
    return Figures(**known[key])


def remembered(file: Path) -> dict[str, Any]:
    """What was measured before; a file that somebody else has left half is measured anew."""
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rft" / "machine.json"


def _measure(dtype: str, threads: int, cores: int) -> dict[str, Any]:
    """Two ranks measure at the same time, so that each has what it will have beside another."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-W", "ignore", "-m", "rft.tools.figures", dtype, str(threads), port]
    ranks = [
        subprocess.Popen(
            [*command, str(rank)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | thread_environment(threads) | {"GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(2)
    ]
    try:
        found = [json.loads(one.communicate(timeout=MEASURE_S)[0] or "null") for one in ranks]
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    if None in found:
        raise RuntimeError("measuring this machine failed; the message of a rank is above")
    return found[0] | {"name": f"this machine, {threads} thread(s) a rank", "cores": cores}


def usual(work: Callable[[], Any], threads: int = 1) -> float:
    """Processor seconds of one, of `threads` at a time: what it takes while nobody else computes,
    also where somebody does.
    """
    work()
    found = []
    for _ in range(TRIES):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return max(1e-7, statistics.median(found) / threads)


def measure_rank(dtype: str, threads: int, port: str, rank: int) -> dict[str, Any]:
    """In one of two processes."""
    import torch
    import torch.distributed as dist
    from torch.nn.functional import scaled_dot_product_attention as attend

    from rft.ground.device import torch_dtype

    torch.set_num_threads(threads)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    kind = torch_dtype(dtype)

    def product(width: int, rows: int = 1024) -> float:
        x, y = torch.randn(rows, width).to(kind), torch.randn(width, width).to(kind)
        return 2 * rows * width * width / usual(lambda: x @ y, threads)

    narrow, wide = product(64), product(512)
    gain = min(max(wide / narrow, 1.0), MOST_GAIN)
    half = (gain - 1) / (1 / 64 - gain / 512)
    q, long, few = torch.randn(4, 4, 256, 32), torch.randn(2**20), torch.randn(16)
    attended = usual(lambda: attend(q, q, q, is_causal=True), threads)  # in fp32, as rft's own is
    streamed = usual(lambda: long * long, threads)
    launches = usual(lambda: [few + 1 for _ in range(100)])
    message = usual(lambda: [dist.all_reduce(few) for _ in range(50)]) / 50
    whole, half_of_it = torch.zeros(2**22), torch.zeros(2**21)

    def exchanged() -> None:
        """As sequences of tensor-parallel ranks are; gradients and weights go in place, in less
        (`rft.megatron.cpu_port`).
        """
        dist.reduce_scatter_tensor(half_of_it, whole)
        dist.all_gather_into_tensor(whole, half_of_it)

    sent = usual(exchanged)
    weight = torch.nn.Parameter(torch.zeros(2**21))
    adam = torch.optim.AdamW([weight], lr=0.0)

    def updated() -> None:
        """Gradients zeroed, summed from a backward pass, measured, applied."""
        weight.grad = torch.zeros(2**21)
        weight.grad += weight.detach()
        weight.grad *= 1.0 / (1.0 + weight.grad.norm())
        adam.step()

    found = {
        "memory": 0.0,
        "peak": 0.0,
        "products": wide * (1 + half / 512),
        "half_width": half,
        "attention": 2 * 4 * 4 * 256 * 256 * 32 / attended,
        "stream": 3 * 4 * 2**20 / streamed,
        "launch": launches / 100,
        "update": usual(updated, threads) / 2**21,
        "near": 4 * 2**22 / sent,
        "far": 4 * 2**22 / sent,
        "message": message + AROUND,
    }
    dist.barrier()
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    asked, count, where, number = sys.argv[1:]
    print(json.dumps(measure_rank(asked, int(count), where, int(number))), flush=True)
