"""`rft plan`: which layout it takes for models of published sizes, what it says of it, and what it
refuses.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from rft.config import RolloutModelConfig
from rft.data.balance import projected
from rft.ground.errors import ConfigError
from rft.ground.names import Dims, hf_names
from rft.preflight import memory_plan
from rft.run.cards import Card, Machine
from rft.tools import config as config_tool
from rft.tools import figures, planner
from rft.tools.figures import CARDS, Figures
from rft.tools.layout_search import Search, divisors, per_host
from rft.tools.step_time import StepTime

GRPO = ("experiment=grpo", "model.max_prompt_tokens=2048", "model.max_response_tokens=6144")
DENSE, LARGE, EXPERTS = "Qwen/Qwen3-8B", "meta-llama/Llama-3.1-70B", "Qwen/Qwen3-235B-A22B"
SMALL = "Qwen/Qwen3-0.6B"
DEEPSEEK = {  # what decides sizes in the published config.json of DeepSeek-V3
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
GPT_OSS = {  # of gpt-oss-20b; every other layer sees 128 tokens
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "vocab_size": 201088,
}
CPU = Figures("a test's", 0, 0, 1e11, 64, 5e10, 2e10, 1e-8, 2e-6, 1e9, 1e9, 1e-4, cores=2)


def asked(directory: Path, *words: str) -> Search:
    options, rest = planner.parser().parse_known_args(words)
    ((_, found),) = planner.searches(rest, options, directory)
    return found


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, dict[str, Any]]:
    """(exit code, text, what the last line records)."""
    code = planner.main([*words])
    text = capsys.readouterr().out
    return code, text, json.loads(text.splitlines()[-1])["plan"]


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This machine was measured before."""
    monkeypatch.setattr(figures, "measured", lambda *_: CPU)
    yield


# --- what is chosen -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "model_parallel"),
    [
        (("size=qwen3_8b_8gpu", "--cards=h100"), 2),
        (("size=llama3_70b_64gpu", "--cards=h100:64"), 16),
        (("size=qwen3_235b_a22b_192gpu", "--cards=h100:192"), 32),
        (("size=qwen3_30b_a3b_16gpu", "--cards=h100:16"), 4),
    ],
)
def test_recipes_fit_and_the_large_ones_are_what_is_chosen(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], model_parallel: int
) -> None:
    code, text, plan = said(capsys, "experiment=grpo", *words)
    assert code == 0 and plan["fits"] and plan["configured"]["fits"]
    chosen, own = plan["chosen"], plan["configured"]
    assert chosen["step_s"] <= own["step_s"] and chosen["rank_gb"] < 77
    sizes = dict(part.rsplit("=", 1) for part in chosen["words"])
    tensor, stages, experts = (
        int(sizes[f"trainer.megatron.{one}_model_parallel_size"])
        for one in ("tensor", "pipeline", "expert")
    )
    assert tensor <= 8 and tensor * stages * experts >= model_parallel
    if "64gpu" in words[0] or "192gpu" in words[0]:
        assert chosen["layout"] == own["layout"], "the recipe is not what rft plan takes"
    assert "no card was asked" in text


def test_what_is_printed_means_that_layout(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*GRPO, f"model.model_path={DENSE}", "--cards=h100:16", "trainer.num_ranks=8")
    _, text, plan = said(capsys, *words)
    for phrase in ("chosen", "memory of a card: ", "memory of a host: ", "to run it: ", "weights "):
        assert phrase in text
    assert "why not the others:" in text and "exchanges of tensor parallelism" in text
    _, _, again = said(capsys, *words, *plan["chosen"]["words"])
    assert again["configured"]["layout"] == plan["chosen"]["layout"]
    assert again["configured"]["step_s"] == plan["chosen"]["step_s"]


def test_what_is_printed_takes_back_what_the_layout_has_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """So that behind the same words it is a run: of as many engines, too."""
    given = ("tensor_model_parallel_size=2", "pipeline_model_parallel_size=2")
    given += ("sequence_parallel=true", "virtual_pipeline_model_parallel_size=2")
    words = (*GRPO, f"model.model_path={SMALL}", *(f"trainer.megatron.{one}" for one in given))
    _, _, plan = said(capsys, *words, "--cards=h100:16")
    printed = plan["chosen"]["words"]
    assert plan["chosen"]["layout"].startswith("tp1 pp1 ")
    raw = config_tool.composed([*words, *printed])
    assert raw.trainer.megatron.virtual_pipeline_model_parallel_size is None
    assert raw.trainer.megatron.sequence_parallel is False
    assert raw.explorer.rollout_model.engine_num == 8 and raw.trainer.num_ranks == 8


def test_a_model_that_fits_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*GRPO, f"model.model_path={LARGE}", "--cards=a100:8", "mode=train")
    code, text, plan = said(capsys, *words)
    assert code == 1 and not plan["fits"] and plan["chosen"] is None
    assert "nothing fits." in text and "of it optimizer" in text


def test_an_engine_that_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*GRPO, f"model.model_path={LARGE}", "--cards=h100:64", "trainer.num_ranks=32")
    code, text, _ = said(capsys, *words, "explorer.rollout_model.tensor_parallel_size=1")
    assert code == 1 and "raise explorer.rollout_model.tensor_parallel_size" in text
    long = ("model.max_response_tokens=null", "model.max_model_len=131072")
    words = (*GRPO, *long, f"model.model_path={LARGE}", "--cards=h100:16", "trainer.num_ranks=8")
    code, text, _ = said(capsys, *words, "explorer.rollout_model.tensor_parallel_size=2")
    assert code == 1 and "of one sequence of 131,072 tokens, 21.47 GB of keys" in text


# as vLLM's `kv_cache_spec` has them: bytes of a token in bf16
@pytest.mark.parametrize(
    ("hf", "workers", "tokens", "bytes_"),
    [
        (figures.SHAPES[LARGE], 1, 1, 327_680),
        (figures.SHAPES[LARGE], 8, 1, 40_960),
        (figures.SHAPES[LARGE], 16, 1, 40_960),  # of eight heads each worker has one
        (DEEPSEEK, 1, 1, 70_272),
        (DEEPSEEK, 16, 1, 70_272),  # one row for all heads
        (GPT_OSS, 1, 1000, 12 * 2048 * (1000 + 128)),
    ],
)
def test_what_an_engine_keeps_of_a_sequence(
    hf: dict[str, Any], workers: int, tokens: int, bytes_: int
) -> None:
    rollout = RolloutModelConfig(tensor_parallel_size=workers, dtype="bf16")
    assert memory_plan.cached_bytes(hf, rollout, tokens) == bytes_


def test_latent_attention_is_timed_by_what_it_computes() -> None:
    dims = Dims.of(DEEPSEEK)
    own = {name: prod(shape) for name, shape in hf_names(dims, "DeepseekV3ForCausalLM").items()}
    layer = [n for name, n in own.items() if ".layers.3.self_attn." in name and "norm" not in name]
    assert projected(dims) == sum(layer)


def test_models_beside_the_policy_are_as_large_as_they_are(tmp_path: Path) -> None:
    """A critic of 8B parameters beside a policy of 0.6B, with an adapter or without."""
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "config.json").write_text(json.dumps(figures.SHAPES[DENSE]))
    words = ("experiment=ppo", *GRPO[1:], f"model.model_path={SMALL}", "--cards=h100:1")
    words += ("cluster.gpu_per_node=1", "mode=train")

    def planned(*more: str) -> memory_plan.MemoryPlan:
        return memory_plan.plan(asked(tmp_path, *words, *more).config)

    lora = "model.lora_configs=[{lora_rank: 8}]"
    small, adapted = planned(), planned(lora)
    critic = f"model.critic_model_path={tmp_path / 'large'}"
    large, both = planned(critic), planned(critic, lora)
    assert large.beside - small.beside == (8_190_735_360 - 596_049_920) * 18
    assert large.checkpoint - small.checkpoint == (8_190_735_360 - 596_049_920) * 14
    assert adapted.beside == small.beside and both.checkpoint > 8_190_735_360 * 14
    assert adapted.weights == small.weights + 2 * adapted.trained
    assert both.staging > 2 * 8_190_735_360 * 14
    reference = f"model.ref_model_path={tmp_path / 'large'}"
    assert planned(reference).beside - small.beside == (8_190_735_360 - 596_049_920) * 2


def test_layers_that_are_not_computed_again_keep_everything(tmp_path: Path) -> None:
    """Of 28 layers: `block` names those that are, `uniform` how many are at a time."""
    words = (*GRPO, f"model.model_path={SMALL}", "--cards=h100:1", "cluster.gpu_per_node=1")

    def kept(*more: str) -> int:
        given = [f"trainer.recompute_{one}" for one in more]
        return memory_plan.plan(asked(tmp_path, *words, "mode=train", *given).config).activations

    whole, each = kept(), kept("granularity=full")
    block = "granularity=full", "method=block"
    assert kept(*block, "num_layers=28") == each < 0.1 * whole
    assert kept(*block) > whole and kept(*block, "num_layers=14") > whole / 2
    assert abs(kept("granularity=full", "num_layers=14") - whole / 2) < each


def test_of_an_engine_wider_than_a_node_a_host_has_its_share(tmp_path: Path) -> None:
    words = (*GRPO, f"model.model_path={LARGE}", "--cards=h100:64", "trainer.num_ranks=32")
    received = []
    for size in (8, 16):
        found = asked(tmp_path, *words, f"explorer.rollout_model.tensor_parallel_size={size}")
        memory = replace(memory_plan.plan(found.config), staging=0, kept=0)
        parts = per_host(found.config, memory, found.site)
        received.append(parts["weights that engines receive"])
    assert received[1] == received[0] / 2 and received[0] == memory.parameters * 2


# --- the models of memory and time ----------------------------------------------------------------


def test_more_ranks_hold_less_and_take_less_time(tmp_path: Path) -> None:
    words = (*GRPO, f"model.model_path={DENSE}", "mode=train")
    few, many = (asked(tmp_path, *words, f"--cards=h200:{count}") for count in (8, 32))
    assert many.fitting[0].seconds.total < few.fitting[0].seconds.total
    by_name = {one.name: one.memory for one in (*few.fitting, *few.lacking)}
    for less, more in (
        ("tp2 pp1 cp1 dp4", "tp1 pp1 cp1 dp8"),
        ("tp1 pp2 cp1 dp4", "tp1 pp1 cp1 dp8"),
        ("tp1 pp1 cp2 dp4", "tp1 pp1 cp1 dp8"),
        ("tp8 pp1 cp1 dp1", "tp4 pp1 cp1 dp2"),
        ("tp4 pp1 cp1 dp2 recompute", "tp4 pp1 cp1 dp2"),
    ):
        assert by_name[less].rank <= by_name[more].rank, (less, more)
    assert by_name["tp1 pp1 cp1 dp8"].optimizer * 8 == pytest.approx(
        12 * by_name["tp1 pp1 cp1 dp8"].parameters, rel=1e-3
    )


def test_nothing_is_quicker_on_a_worse_machine(tmp_path: Path) -> None:
    found = asked(tmp_path, *GRPO, f"model.model_path={EXPERTS}", "--cards=h200:64", "mode=train")
    known, slower = found.site.figures, {"message": 10, "launch": 10, "update": 10}
    rates = dict.fromkeys(("near", "far", "products", "attention", "stream"), 0.1)
    worse = {
        name: replace(known, **{name: getattr(known, name) * factor})
        for name, factor in (slower | rates).items()
    }
    for one in (*found.fitting, *found.lacking)[::40]:
        timed = {
            name: StepTime(one.config, found.hf, figures, found.site.per_node, found.length)
            for name, figures in worse.items()
        }
        for name, time in timed.items():
            assert time.seconds().total >= one.seconds.total, (one.name, name)
        longer = StepTime(one.config, found.hf, known, found.site.per_node, 1.5 * found.length)
        assert longer.seconds().total > one.seconds.total, one.name


def test_a_prompt_counts_once_where_its_group_shares_it(tmp_path: Path) -> None:
    """Of 8 rows with a prompt of three responses (3R + R): (3R + 8R) / 32R of the tokens."""
    words = (*GRPO, f"model.model_path={DENSE}", "--cards=h100:8", "mode=train", "--length=4096")
    words = (*words, "algorithm.repeat_times=8")
    whole, shared, unrolled = (
        {one.name: one.seconds for one in (*found.fitting, *found.lacking)}
        for found in (
            asked(tmp_path, *words),
            asked(tmp_path, *words, "--prompt=3072"),
            asked(tmp_path, *words, "--prompt=3072", "trainer.share_prefixes=false"),
        )
    )
    one = "tp2 pp1 cp1 dp4"
    assert shared[one].tensor == pytest.approx(11 / 32 * whole[one].tensor, rel=0.05)
    assert shared[one].compute < 0.45 * whole[one].compute
    assert unrolled[one].tensor == whole[one].tensor
    assert unrolled[one].compute < whole[one].compute, "no logits of a prompt"
    cut = "tp2 pp1 cp2 dp2"
    assert shared[cut] == unrolled[cut], "rows that context parallelism cuts are whole"


def test_a_rank_plans_with_no_more_tokens_than_a_step_has(tmp_path: Path, cores: None) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 256, "intermediate_size": 128}
    small = figures.SHAPES[DENSE] | sizes | {"num_attention_heads": 8}
    (tmp_path / "config.json").write_text(json.dumps(small), encoding="utf-8")
    words = ("experiment=sft", f"model.model_path={tmp_path}", "model.max_model_len=64")
    words = (*words, "device=cpu")
    few, many = (
        asked(tmp_path, *words, f"buffer.train_batch_size={rows}").own for rows in (2, 400)
    )
    assert few and many
    assert memory_plan.tokens_of_rank(few.config) == 128 == 2 * 64
    assert memory_plan.tokens_of_rank(many.config) == 2 * 64 and few.memory.rank == many.memory.rank
    words = (*words, "trainer.max_token_len_per_gpu=512", "trainer.num_ranks=2")
    found = asked(tmp_path, *words, "buffer.train_batch_size=64")
    by_name = {one.name: one.memory for one in found.fitting}
    # half of the layers, of two microbatches
    whole, stages = by_name["tp1 pp1 cp1 dp2"], by_name["tp1 pp2 cp1 dp1"]
    assert stages.activations == whole.activations and stages.weights < whole.weights


def test_this_machine_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked_for: list[tuple[str, int, int]] = []

    def measure(dtype: str, threads: int, cores: int) -> dict[str, Any]:
        asked_for.append((dtype, threads, cores))
        return vars(CPU)

    monkeypatch.setattr(figures, "_measure", measure)
    for _ in range(2):
        assert figures.measured("fp32", 1, 2) == CPU
    assert figures.measured("bf16", 1, 2) == CPU == figures.measured("fp32", 1, 2, again=True)
    assert asked_for == [("fp32", 1, 2), ("bf16", 1, 2), ("fp32", 1, 2)]


@pytest.mark.parametrize("left", [b"", b'{"a', b"[1]", b"\xff"])
def test_a_measurement_that_cannot_be_read_or_kept_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], left: bytes
) -> None:
    monkeypatch.setattr(figures, "_measure", lambda *_: vars(CPU))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "rft").mkdir()
    (tmp_path / "rft" / "machine.json").write_bytes(left)
    assert figures.measured("fp32", 1, 2) == CPU
    assert json.loads((tmp_path / "rft" / "machine.json").read_text("utf-8"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "rft" / "machine.json"))
    assert figures.measured("fp32", 1, 2) == CPU
    assert "cannot be written (Not a directory)" in capsys.readouterr().err


@pytest.mark.verify
def test_two_ranks_measure_this_machine() -> None:
    found = Figures(**figures._measure("fp32", 1, 2))
    assert 1e9 < found.products < 1e13 and 1e8 < found.near < 1e11 and found.message < 1
    assert found.on_cpu and not found.memory and found.update < 1e-5


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--cards=h1000:8",), "--cards h1000: of this card no figures are known; use one of a100"),
        (("--cards=h100:many",), "--cards h100:many: write the number of cards behind the name"),
        (("--cards=h100:0",), "write the number of cards"),
        (("--cards=h100:12",), "no whole number of nodes of 8: change it, or set cluster.gpu_per"),
        (("--cards=h100:8", "trainer.num_ranks=16"), "num_ranks=16 .* more than the 8 there"),
        (("--cards=h100:8", "mode=train", "trainer.num_ranks=9"), "is more than the 8 cards there"),
        (("--cards=h100:8", "mode=serve"), "mode=serve trains nothing, so nothing is laid out"),
        (("--cards=h100:8", "model.tinker.enable=true"), "a Tinker service trains, so nothing is"),
        (("device=cuda",), "device=cuda, and this machine shows no cards: give --cards NAME:N"),
        (("--cards=h100:8", "trainer.num_rank=4"), "trainer.num_ranks"),
        (("--cards=h100:8", "--length=9000"), "--length 9000 is more than model.max_model_len=81"),
    ],
)
def test_words_that_cannot_be_planned(tmp_path: Path, words: tuple[str, ...], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        asked(tmp_path, *GRPO, f"model.model_path={DENSE}", *words)


def test_numbers_that_mean_nothing_are_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--host=0", "--network=nan", "--length=-5", "--prompt=-1")
    assert planner.main([*GRPO, f"model.model_path={DENSE}", "--cards=h100", *words]) == 2
    told = capsys.readouterr().err
    assert "4 problems" in told and "--length -5: give a number of at least 2" in told


def test_a_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert planner.main([*GRPO, "--cards=h100"]) == 2
    assert "give a directory, or one of Qwen/Qwen3-0.6B" in capsys.readouterr().err
    assert planner.main([*GRPO, "--cards=h100", f"model.model_path={tmp_path}"]) == 2
    assert "cannot read config.json" in capsys.readouterr().err


def test_cards_are_known_by_the_drivers_name() -> None:
    assert figures.of_card("NVIDIA H100 80GB HBM3") == CARDS["h100"]
    assert figures.of_card("NVIDIA A100-SXM4-80GB") == CARDS["a100"]
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


def test_cards_of_this_machine_need_no_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def machine(name: str) -> Machine:
        return Machine(tuple(Card(n, name) for n in range(4)), visible=tuple("0123"))

    words = (*GRPO, f"model.model_path={DENSE}", "mode=train")
    monkeypatch.setattr(planner.cards, "here", lambda: machine("NVIDIA H200"))
    found = asked(tmp_path, *words)
    assert (found.site.figures.name, found.site.total, found.ranks) == ("h200", 4, 4)
    monkeypatch.setattr(planner.cards, "here", lambda: machine("NVIDIA GeForce RTX 4090"))
    with pytest.raises(ConfigError, match="NVIDIA GeForce RTX 4090: of this card no figures"):
        asked(tmp_path, *words)
