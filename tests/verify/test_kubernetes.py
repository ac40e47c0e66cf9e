"""The Kubernetes files against the published schemas of the API, and that their pods fit together.

`make verify` fetches the schemas, as pinned in requirements/kubernetes-schemas.txt, into a
directory of their own.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SCHEMAS = Path(sys.prefix) / "kubernetes-schemas"
VERSIONS = ("1.31", "1.34")  # podFailurePolicy is stable since the first
FILES = sorted((ROOT / "launch" / "kubernetes").glob("*.yaml"))

pytestmark = pytest.mark.verify


def validate(path: Path, version: str) -> "subprocess.CompletedProcess[str]":
    if not SCHEMAS.exists():
        pytest.skip(f"{SCHEMAS} is missing; `make verify` fetches it")
    command = [sys.executable, "-m", "kubernetes_validate", "--strict", "-k", version, str(path)]
    return subprocess.run(
        command, env={"PYTHONPATH": str(SCHEMAS)}, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_file_is_valid(path: Path, version: str) -> None:
    done = validate(path, version)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_misspelt_field_would_be_found(tmp_path: Path) -> None:
    text = (
        FILES[0]
        .read_text(encoding="utf-8")
        .replace("terminationGracePeriodSeconds", "terminationGraceSeconds")
    )
    (tmp_path / "wrong.yaml").write_text(text, encoding="utf-8")
    assert validate(tmp_path / "wrong.yaml", VERSIONS[-1]).returncode != 0


def parts() -> dict[str, dict[str, Any]]:
    found = [
        part for path in FILES for part in yaml.safe_load_all(path.read_text(encoding="utf-8"))
    ]
    return {part["kind"]: part for part in found}


def test_engines_find_the_trainer() -> None:
    service, job, engines = (parts()[kind] for kind in ("Service", "Job", "Deployment"))
    assert service["spec"]["selector"] == job["spec"]["template"]["metadata"]["labels"]
    trainer, engine = (part["spec"]["template"]["spec"]["containers"][0] for part in (job, engines))
    address = f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    assert f"--address={address}" in engine["command"][2]
    for name in ("image", "volumeMounts", "securityContext"):
        assert trainer[name] == engine[name]
    # what is more is for the collectives, and reaches engines through the run
    assert trainer["env"][: len(engine["env"])] == engine["env"]
    assert all(
        one["name"].startswith(("NCCL_", "GLOO_")) for one in trainer["env"][len(engine["env"]) :]
    )
    assert {*trainer["resources"]["limits"]} == {*engine["resources"]["limits"]}
    assert (
        engines["spec"]["selector"]["matchLabels"]
        == engines["spec"]["template"]["metadata"]["labels"]
    )


def test_the_scripts_in_them_parse() -> None:
    for kind in ("Job", "Deployment"):
        words = parts()[kind]["spec"]["template"]["spec"]["containers"][0]["command"]
        assert words[:2] == ["bash", "-c"]
        subprocess.run(["bash", "-n", "-c", words[2]], check=True)
