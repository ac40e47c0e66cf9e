"""Every name, keyword and number of arguments that rft uses of torch.cuda, torch.distributed, vLLM
and megatron-core, and megatron-core of Transformer Engine, against the sources and stubs of these:
also what runs on GPUs alone.

Nothing of them is run (see `source_types`). What is used is found in the text, not in a list.
"""

import ast
import functools
import gc
import re
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import pytest
from source_types import Sources, class_in_stub

from rft.ground.device import HANDLE

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = Path(sysconfig.get_paths()["purelib"])
MEGATRONS = {"installed": INSTALLED, "newest": Path(sys.prefix) / "newest-megatron"}
LIBRARIES = ("vllm", "torch.cuda", "torch.distributed", "torch._C", "torch.accelerator")
EXTENSION = "megatron.core.extensions.transformer_engine"
RECORD = Path(__file__).parent / "te" / "te.tsv"
# what rft leaves unsaid, by the name of the parameter
HINTS = {"vllm_config": "vllm.config.VllmConfig"}
# classes of torch's C++ that the Python above them inherits or gives
OF_C = ("Stream", "Event", "_CudaDeviceProperties", "_CudaStreamBase", "_CudaEventBase")
IMPORT = re.compile(r"^\s*(?:import|from) (?:torch|vllm|megatron)\b", re.M)
# megatron annotates these as the base of what it makes of them
NARROWER = (
    "megatron.core.model_parallel_config.ModelParallelConfig has no init_method",
    "megatron.core.optimizer.optimizer.MegatronOptimizer has no is_stub_optimizer",
)


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def module_of(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


RFT = {
    module_of(path, ROOT): path
    for path in sorted((ROOT / "rft").rglob("*.py"))
    if IMPORT.search(text_of(path))
}


@functools.cache
def torch_stubs() -> dict[str, str]:
    """Of a very long stub what is needed; and the methods of process groups that torch's stub
    leaves out, as the library itself describes them.
    """
    from torch._C._distributed_c10d import Backend

    stubs = INSTALLED / "torch" / "_C"
    groups = text_of(stubs / "_distributed_c10d.pyi")
    told = class_in_stub(stubs / "_distributed_c10d.pyi", "Backend")
    described = [
        _as_stub(name, given)
        for name, member in vars(Backend).items()
        if not name.startswith("_") and f"def {name}(" not in told
        for given in re.findall(rf"\b{name}\(self: [\w.]+(?:, )?(.*)\) -> ", member.__doc__ or "")
    ]
    rest = "import torch\ndef __getattr__(name): ...\n"
    return {
        "torch._C": "".join(class_in_stub(stubs / "__init__.pyi", name) for name in OF_C) + rest,
        "torch._C._distributed_c10d": groups.replace(told, told + "".join(described)),
    }


def _as_stub(name: str, given: str) -> str:
    """Of one line of pybind's description."""
    parts = [part.split(": ", 1) for part in re.split(r", (?=\w+: )", given) if part]
    names = [name + (" = ..." if " = " in rest else "") for name, rest in parts]
    return f"    def {name}({', '.join(['self', *names])}): ...\n"


def problems(sources: Sources, shown: dict[str, str]) -> set[str]:
    """`shown`: the modules that are examined, and how they are named."""
    gc.disable()  # thousands of syntax trees, which all stay
    try:
        for module, name in shown.items():
            sources.examine(module, name)
    finally:
        gc.enable()
    return {line for line in sources.problems if not line.endswith(NARROWER)}


def of_rft(megatron: str, libraries: tuple[str, ...], changed: dict[str, str]) -> Sources:
    return Sources(
        {"rft": ROOT, "megatron": MEGATRONS[megatron], "vllm": INSTALLED, "torch": INSTALLED},
        ("rft", "megatron.core", *libraries),
        HINTS,
        torch_stubs() | changed,
        "rft.",
    )


def files(modules: Iterable[str]) -> dict[str, str]:
    return {module: str(RFT[module].relative_to(ROOT)) for module in modules}


def test_rft_uses_what_its_libraries_have() -> None:
    sources = of_rft("installed", LIBRARIES, {})
    assert not problems(sources, files(RFT))
    assert len(sources.seen) > 150


def test_rft_uses_what_the_newest_megatron_has() -> None:
    sources = of_rft("newest", (), {})
    modules = [name for name in RFT if re.search(r"^from megatron", text_of(RFT[name]), re.M)]
    assert not problems(sources, files(modules))
    assert len(sources.seen) > 40


def calls(path: Path, name: str) -> list[ast.Call]:
    return [
        node
        for node in ast.walk(ast.parse(text_of(path)))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == name
    ]


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("cuda/_pin_memory_utils.py", "cudaHostRegister"),
        ("cuda/_pin_memory_utils.py", "cudaHostUnregister"),
        ("multiprocessing/reductions.py", "_new_shared_cuda"),
    ],
)
def test_what_no_stub_has_is_called_as_torch_calls_it(file: str, name: str) -> None:
    theirs = {len(call.args) for call in calls(INSTALLED / "torch" / file, name)}
    ours = [call for path in RFT.values() for call in calls(path, name)]
    assert ours
    for call in ours:
        splat = any(isinstance(arg, ast.Starred) for arg in call.args)
        assert {len(HANDLE) if splat else len(call.args)} == theirs


# --- what megatron takes of Transformer Engine ---------------------------------------------------


def engine_stubs() -> dict[str, str]:
    """The record of Transformer Engine's wheel as the text of stubs."""
    texts: dict[str, list[str]] = {}
    methods: dict[tuple[str, str], list[str]] = {}
    rows = [line.split("\t") for line in text_of(RECORD).splitlines()]
    for module, name, what in rows:
        owner, _, method = name.partition(".")
        if method and not method.endswith(":"):
            mark = {"self": "", "cls": "    @classmethod\n"}.get(
                re.split(r"\W", what)[0], "    @staticmethod\n"
            )
            methods.setdefault((module, owner), []).append(f"{mark}    def {method}({what}): ...\n")
    for module, name, what in rows:
        if what == "module" and not name:
            texts.setdefault(module, [])
        elif what.startswith("class(") and "." not in name:
            bases, own = what.removeprefix("class"), methods.get((module, name), [])
            open_ = ["    def __getattr__(self, name): ...\n"] * (not own)
            texts[module].append(f"class {name}{bases}:\n{''.join(own + open_)}")
        elif what.startswith("function("):
            texts[module].append(f"def {name}{what.removeprefix('function')}: ...\n")
        elif "." not in name and name and what != "absent":
            texts[module].append(f"{name} = ...\n")
    return {module: "".join(lines) for module, lines in texts.items()}


def of_megatron(megatron: str, changed: dict[str, str]) -> Sources:
    return Sources(
        {"megatron": MEGATRONS[megatron]},
        ("megatron.core", "transformer_engine"),
        {},
        engine_stubs() | changed,
        "megatron.",
    )


@pytest.mark.parametrize("megatron", sorted(MEGATRONS))
def test_megatron_takes_what_transformer_engine_has(megatron: str) -> None:
    sources = of_megatron(megatron, {})
    assert not problems(sources, {EXTENSION: EXTENSION})
    assert len(sources.seen) > 25


# --- these tests can fail -------------------------------------------------------------------------

PLANTED = {
    "torch.cuda.Stream().wait(None)": "torch.cuda.streams.Stream has no wait",
    "torch.cuda.Event().wait_for(None)": "torch.cuda.streams.Event has no wait_for",
    "torch.cuda.current_stream(None, 1)": "takes 1 positional arguments, given are 2",
    "torch.cuda.get_device_properties(0).bytes": "_CudaDeviceProperties has no bytes",
    "torch.distributed.new_group(within=3)": "new_group takes no keyword within",
    "torch.distributed.ProcessGroupNCCL(None, 0).abort()": "__init__ needs size, options",
    "torch.distributed.ProcessGroupNCCL(None, 0, 2, None).send([], 1)": "Backend.send needs tag",
    "from vllm.v1.engine.async_llm import Async": "vllm.v1.engine.async_llm has no Async",
    "from megatron.core import parallel": "megatron.core has no parallel",
}


def test_a_planted_use_is_told_by_file_and_line() -> None:
    text, known = text_of(RFT["rft.ground.device"]), files(["rft.ground.device"])
    lines = "".join(f"    {line}\n" for line in PLANTED)
    begins = text.count("\n") + 3
    changed = {"rft.ground.device": f"{text}\ndef planted():\n    import torch\n{lines}"}
    found = problems(of_rft("installed", LIBRARIES, changed), known)
    for number, told in enumerate(PLANTED.values(), begins + 1):
        here = [line for line in found if line.startswith(f"rft/ground/device.py:{number} ")]
        assert here and here[0].endswith(told), (told, found)


@pytest.mark.parametrize(
    ("module", "is_now", "becomes", "told"),
    [
        ("rft.rollout.engine", '"max_num_seqs"', '"max_seqs"', "takes no keyword max_seqs"),
        ("rft.rollout.engine", "lora_request=", "lora=", "AsyncLLM.generate takes no keyword lora"),
        ("rft.rollout.engine", "made.weight_versions", "made.versions", "has no versions"),
        ("rft.sync.install", "def finish_weight_update", "def finish", "wants a finish_weight"),
        ("rft.sync.install", "init_info: InitInfo", "info: InitInfo", "is given init_info"),
        ("rft.megatron.mesh", "create_gloo_process_groups", "gloo", "takes no keyword gloo"),
    ],
)
def test_a_renamed_use_is_told(module: str, is_now: str, becomes: str, told: str) -> None:
    text = text_of(RFT[module])
    assert is_now in text
    changed = {module: text.replace(is_now, becomes)}
    found = problems(of_rft("installed", LIBRARIES, changed), files([module]))
    assert len(found) == 1 and told in found.pop()


def test_a_keyword_that_transformer_engine_drops_is_told() -> None:
    row = engine_stubs()["transformer_engine.pytorch"].replace("fuse_wgrad_accumulation", "fuse")
    sources = of_megatron("newest", {"transformer_engine.pytorch": row})
    found = problems(sources, {EXTENSION: EXTENSION})
    assert any("LayerNormLinear.__init__ takes no keyword fuse_wgrad" in line for line in found)
