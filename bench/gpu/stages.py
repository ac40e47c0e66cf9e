"""The first hour on GPUs: what `python -m bench.gpu` runs, in this order, each in its own process.

A stage says what it needs, how long it may take, its bars in words, and its command; `stand_in` is
what runs instead on a machine without a card, where it is not the same. In both, `{kind}` is
"cuda" or "cpu".
"""

from dataclasses import dataclass

TORCH = ("torch",)
MEGATRON = (*TORCH, "megatron-core", "transformers")
ENGINE = (*TORCH, "vllm")
LOOP = (*MEGATRON, "vllm", "ray")


@dataclass(frozen=True)
class Stage:
    """`needs`: distributions; `tool`: a program. `by_hand`: what to type instead, where one command
    on one machine cannot show it. `claims`: a benchmark that compares speeds, which stand-ins have
    none of: there its `meets` is not asked.
    """

    name: str
    what: str
    bar: str
    seconds: float
    needs: tuple[str, ...]
    command: tuple[str, ...] = ()
    stand_in: tuple[str, ...] = ()
    cards: int = 1
    tool: str = ""
    by_hand: str = ""
    claims: bool = False


def checked(program: str, check: str) -> tuple[str, ...]:
    return ("-m", f"bench.gpu.{program}", check, "{kind}")


STAGES = (
    Stage(
        "0.doctor",
        "what is installed and what the driver says",
        "no line fails",
        300,
        TORCH,
        ("-c", "import sys; from rft.tools import doctor; sys.exit(doctor.main([]))"),
    ),
    Stage(
        "1.ipc",
        "buckets between two processes on one card: wrong bits, a hang, kill -9",
        "bitwise; 2 flipped bits sent again; an end in < 5 s",
        120,
        TORCH,
        checked("device", "ipc"),
    ),
    Stage(
        "1.nccl",
        "the same between two cards (NCCL refuses two ranks on one)",
        "bitwise; 2 flipped bits sent again; an end in < 5 s",
        120,
        TORCH,
        checked("device", "nccl"),
        cards=2,
    ),
    Stage(
        "1.copier",
        "copies to host memory while the computation changes what is copied",
        "bitwise",
        120,
        TORCH,
        checked("device", "copier"),
    ),
    Stage(
        "1.checksum",
        "the checksum of a bucket on the card and on the host",
        "equal; other bits, another sum",
        120,
        TORCH,
        checked("device", "checksum"),
    ),
    Stage(
        "1.allocator",
        "shared memory under expandable segments",
        "of ordinary segments",
        120,
        TORCH,
        checked("device", "allocator"),
    ),
    Stage(
        "1.guard",
        "a process of card 1, its threads and its shared memory",
        "no context on card 0",
        120,
        TORCH,
        checked("device", "guard"),
        cards=2,
    ),
    Stage(
        "1.speed",
        "weights to another process on the card, beside a copy of the card's own (bench.ipc)",
        "0.7 of the copy",
        300,
        TORCH,
        ("-m", "bench.ipc", "--quick"),
        ("-m", "bench.ipc", "--quick", "--billions", "0.005"),
        claims=True,
    ),
    Stage(
        "2.families",
        "toy llama, qwen3, qwen3_moe: own layers, Transformer Engine's, rope fused or not, packed "
        "or one by one, against transformers",
        "log-probabilities: fp32 1e-4, bf16 6e-3 on average; gradients 5e-2 of the norm",
        600,
        MEGATRON,
        checked("parity", "families"),
    ),
    Stage(
        "2.optimizer",
        "five steps of Transformer Engine's FusedAdam and torch's AdamW",
        "weights 1e-5 apart",
        120,
        (*TORCH, "transformer-engine"),
        checked("parity", "optimizer"),
    ),
    Stage(
        "2.checkpoint",
        "save, load into other weights, two more steps of both",
        "bitwise",
        300,
        MEGATRON,
        checked("parity", "checkpoint"),
    ),
    Stage(
        "3.eager",
        "one engine gets other weights twice, beside one started from their files",
        "greedy answers and their log-probabilities bit for bit",
        600,
        ENGINE,
        checked("engine", "eager"),
    ),
    Stage(
        "3.graphs",
        "the same with CUDA graphs",
        "greedy answers and their log-probabilities bit for bit",
        600,
        ENGINE,
        checked("engine", "graphs"),
    ),
    Stage(
        "3.tp2",
        "the same with an engine over two cards",
        "greedy answers and their log-probabilities bit for bit",
        600,
        ENGINE,
        checked("engine", "tp2"),
        cards=2,
    ),
    Stage(
        "4.quickstart",
        "the quickstart in bf16, in turns where there is one card",
        "accuracy > 0.9, sync/probe_mean_diff < 0.05, no bucket again",
        900,
        LOOP,
        checked("runs", "quickstart"),
    ),
    Stage(
        "5.qwen3_0_6b",
        "20 steps of GRPO, random weights of Qwen3-0.6B's shapes, 2k tokens",
        "card memory after step 20 as after step 5",
        1200,
        LOOP,
        checked("runs", "qwen3_0_6b"),
    ),
    Stage(
        "5.step",
        "a step beside a bare loop of megatron-core (bench.train_step)",
        "0.98 of its speed",
        900,
        MEGATRON,
        ("-m", "bench.train_step", "--bare", "--quick"),
        ("-m", "bench.train_step", "--bare", "--rounds", "1"),
        claims=True,
    ),
    Stage(
        "5.decode",
        "the explorer beside its engine alone (bench.rollout)",
        "0.95 of its speed",
        900,
        (*ENGINE, "ray"),
        ("-m", "bench.rollout", "--quick"),
        ("-m", "bench.rollout", "--rounds", "1"),
        claims=True,
    ),
    Stage(
        "6.qwen3_8b",
        "random weights of Qwen3-8B's shapes, 4 ranks TP4 and 4 engines; kill -9 of an engine as "
        "it takes weights, then of a rank",
        "the run goes on and ends well",
        1800,
        LOOP,
        checked("runs", "qwen3_8b"),
        cards=8,
    ),
    Stage(
        "7.experts",
        "random weights of a third of Qwen3-30B-A3B's layers: TP4 EP4 and an engine of TP4",
        "the run ends well",
        1800,
        LOOP,
        checked("runs", "experts"),
        cards=8,
    ),
    Stage(
        "8.nsys",
        "waits for the card in three steps, by Nsight Systems",
        "told",
        900,
        MEGATRON,
        checked("runs", "nsys"),
        tool="nsys",
    ),
    Stage(
        "9.nodes",
        "two nodes",
        "NCCL names its network; every part on a card of its own",
        0,
        LOOP,
        by_hand="NCCL_DEBUG=INFO sbatch --nodes=2 --gpus-per-node=8 launch/slurm.sh "
        "experiment=grpo size=qwen3_30b_a3b_16gpu model.model_path=DIR "
        "buffer.explorer_input.taskset.path=FILE",
    ),
    Stage(
        "10.resume",
        "a training run killed whole at step 5, and gone on with",
        "losses 1e-2 of those of one that was not; staging_wait_s < 1 % of a step",
        900,
        MEGATRON,
        checked("runs", "resume"),
    ),
)
