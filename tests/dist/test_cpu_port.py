"""What the port rewrites, and that it leaves nothing behind."""

import ast
import sys

import pytest

from rft.megatron import cpu_port

from ranks import Ranks


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("f(device='cuda')", "f(device='cpu')"),
        ("x.cuda(0, non_blocking=True)", "x.cpu()"),
        ("p.type() == 'torch.cuda.FloatTensor'", "p.type() == 'torch.FloatTensor'"),
        ("torch.cuda.current_device()", "_rft_cuda.current_device()"),
        ("torch.empty(3, pin_memory=True)", "torch.empty(3)"),
        ("x.cpu().pin_memory()", "x.cpu()"),
        ("torch.is_tensor(x) and x.is_cuda", "torch.is_tensor(x) and x.is_cpu"),
        ("x.record_stream(torch.cuda.current_stream())", "x"),
        ("print('uses cuda graphs')", "print('uses cuda graphs')"),
    ],
)
def test_sources_are_rewritten(source: str, wanted: str) -> None:
    text = ast.unparse(cpu_port.rewrite(source.encode(), "megatron.core.any"))
    assert text.splitlines() == ["from rft.megatron.cpu_port import cuda as _rft_cuda", wanted]


def test_the_import_comes_after_docstring_and_future() -> None:
    source = b'"""Doc."""\nfrom __future__ import annotations\nx = "cuda"'
    text = ast.unparse(cpu_port.rewrite(source, "megatron.core.any"))
    assert text.splitlines()[2] == "from rft.megatron.cpu_port import cuda as _rft_cuda"


def test_installing_after_megatron_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if f is not cpu_port._Finder])
    monkeypatch.setitem(sys.modules, "megatron.core", sys)
    with pytest.raises(RuntimeError, match="install the port first"):
        cpu_port.install()


def test_rewritten_code_is_never_cached(ranks: Ranks) -> None:
    assert ranks.run("jobs:cached_bytecode", 1) == [[]]


@pytest.mark.parametrize("world", [1, 3])
def test_collectives_of_the_optimizer_give_the_same_bits_without_a_copy(
    ranks: Ranks, world: int
) -> None:
    for same, pages in ranks.run("jobs:within", world):
        assert same == [True, True]
        assert pages < 2**20 * 4 // 4096  # less than one of their shards takes
