"""megatron-core on a CPU: an import hook that rewrites its sources, limited to `megatron.core.*`.

megatron-core names CUDA in its text. The hook changes that text (its syntax tree) while it is
imported:

    "cuda", "cuda:0"            -> "cpu"                 x.cuda(...)       -> x.cpu()
    "torch.cuda.FloatTensor"    -> "torch.FloatTensor"   f(pin_memory=...) -> f()
    torch.cuda                  -> `cuda`, the stand-in below
    x.is_cuda                   -> x.is_cpu              x.record_stream(s) -> x
    torch.compile in core.jit   -> no decorator: inductor needs a C++ compiler and minutes at first
                                use

Nothing of torch is patched. A few names in megatron-core's modules are set behind their import
(`exec_module`), among them the two collectives of its distributed optimizer, which give the same
bits without gloo's copies. Invariant: rewritten code is never written to disk, where it would
poison an environment that another process uses with a GPU.
"""

import ast
import contextlib
import importlib.machinery
import importlib.util
import sys
import types
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

PREFIX = "megatron.core"
STAND_IN = "_rft_cuda"
JIT = PREFIX + ".jit"


class _Nothing:
    """A stream or an event: on a CPU work is finished when the call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self

    def __enter__(self) -> "_Nothing":
        return self

    def __exit__(self, *error: object) -> None:
        pass


@contextlib.contextmanager
def _context(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


def _stand_in() -> types.ModuleType:
    """What rewritten code sees as `torch.cuda`; a name that is missing here falls through to
    torch.cuda itself.
    """
    module = types.ModuleType("torch.cuda stand-in")
    nothing = _Nothing()
    members: dict[str, Any] = {
        "is_available": lambda: False,
        "current_device": lambda: torch.device("cpu"),
        "device_count": lambda: 1,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "Stream": _Nothing,
        "Event": _Nothing,
        "current_stream": lambda device=None: nothing,
        "default_stream": lambda device=None: nothing,
        "stream": _context,
        "device": _context,
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
        "manual_seed_all": torch.manual_seed,
        "FloatTensor": torch.FloatTensor,
        "HalfTensor": torch.HalfTensor,
        "BFloat16Tensor": torch.BFloat16Tensor,
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "__getattr__": lambda name: getattr(torch.cuda, name),
    }
    for name, value in members.items():
        setattr(module, name, value)
    return module


cuda = _stand_in()


def reduce_within(
    shard: torch.Tensor, whole: torch.Tensor, op: Any, group: Any, async_op: bool = False
) -> None:
    """`reduce_scatter_tensor` where `shard` is this rank's range of `whole`, whose other ranges
    nobody reads afterwards. gloo's adds up a copy of the whole and copies back the range: at one
    rank 0.23 s for the gradients of 135M parameters, for nothing. Of the sum every bit is the same.
    On return it is done, also where megatron would go on beside it (`async_op`).
    """
    group.allreduce(whole, op).wait()


def gather_within(
    whole: torch.Tensor, shard: torch.Tensor, group: Any, async_op: bool = False
) -> None:
    """`all_gather_into_tensor` where `shard` is this rank's range of `whole`: every rank sends its
    own to where it belongs, without gloo's copy of the whole.
    """
    for rank, part in enumerate(whole.chunk(group.size())):
        group.broadcast(part, rank).wait()


class _Rewrite(ast.NodeTransformer):
    def __init__(self, module: str) -> None:
        self.in_jit = module == JIT

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str):
            if node.value in ("cuda", "cuda:0"):
                node.value = "cpu"
            elif node.value.startswith("torch.cuda.") and " " not in node.value:
                node.value = "torch." + node.value.removeprefix("torch.cuda.").strip()
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr == "is_cuda":
            node.attr = "is_cpu"
        if isinstance(node.value, ast.Name) and node.value.id == "torch":
            if node.attr == "cuda":
                return ast.copy_location(ast.Name(STAND_IN, node.ctx), node)
            if node.attr == "compile" and self.in_jit:
                return ast.copy_location(ast.Name("noop_decorator", node.ctx), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        node.keywords = [k for k in node.keywords if k.arg != "pin_memory"]
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr == "cuda":
            function.attr, node.args, node.keywords = "cpu", [], []
        elif isinstance(function, ast.Attribute) and (
            function.attr == "record_stream" or (function.attr == "pin_memory" and not node.args)
        ):
            return function.value
        return node


def rewrite(source: bytes, module: str) -> ast.Module:
    """The rewritten syntax tree of one megatron-core module."""
    tree = _Rewrite(module).visit(ast.parse(source))
    first = 0  # after the docstring and the __future__ imports, which must stay in front
    for index, node in enumerate(tree.body):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            first = index + 1
        else:
            break
    tree.body[first:first] = ast.parse(f"from {__name__} import cuda as {STAND_IN}").body
    return ast.fix_missing_locations(tree)


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles from source every time that a module names CUDA;
    all others take the ordinary path.
    """

    def get_code(self, fullname: str) -> types.CodeType | None:
        path = self.get_filename(fullname)
        source = self.get_data(path)
        if fullname != JIT and b"cuda" not in source and b"pin_memory" not in source:
            return super().get_code(fullname)
        return compile(rewrite(source, fullname), path, "exec", dont_inherit=True)

    def _cache_bytecode(self, *args: Any) -> None:
        """Nothing of megatron is cached by a process that runs this hook."""

    def exec_module(self, module: types.ModuleType) -> None:
        super().exec_module(module)
        if module.__name__ == PREFIX + ".tensor_parallel.random":
            # These two read torch's list of CUDA generators, which is empty here: the one exception
            # to "no patches".
            module._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()  # type: ignore[attr-defined]
            module._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)  # type: ignore[attr-defined]
        elif module.__name__ == PREFIX + ".distributed.param_and_grad_buffer":
            module.dist_reduce_scatter_func = reduce_within  # type: ignore[attr-defined]
            module.dist_all_gather_func = gather_within  # type: ignore[attr-defined]
        elif module.__name__ == PREFIX + ".transformer.moe.moe_utils" and not hasattr(
            module, "te_general_gemm"
        ):
            module.te_general_gemm = None  # type: ignore[attr-defined]  # the router asks for it without checking for TE
        elif module.__name__ == PREFIX + ".transformer.multi_latent_attention":
            # it says that it has TE wherever megatron's own stand-ins for it can be imported
            module.HAVE_TE = False  # type: ignore[attr-defined]


class _Finder:
    @staticmethod
    def find_spec(fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if fullname != PREFIX and not fullname.startswith(PREFIX + "."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def install() -> None:
    """Rewrite megatron.core from now on; call before it is first imported.

    A second call does nothing.
    """
    if any(isinstance(finder, type) and finder is _Finder for finder in sys.meta_path):
        return
    if PREFIX in sys.modules:
        raise RuntimeError(
            "megatron.core was imported before rft.megatron.cpu_port.install(); install the port "
            "first"
        )
    # "Transformer Engine and Apex are not installed", six times: true of every CPU, and no news.
    warnings.filterwarnings("ignore", module=r"megatron\.core\.", category=UserWarning)
    sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]
