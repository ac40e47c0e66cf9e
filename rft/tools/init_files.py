"""The files that `rft init` writes: what is in them, by the answers.

In: the answers, lengths in tokens, GPUs of a node. Out: config.yaml, rewards.py, test_rewards.py,
run.sh and, of Kubernetes, the two manifests of `launch/` changed for this run. Invariant: nothing
is looked at here; what a script starts is a script of `launch/`, which knows the machine.
"""

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rft.ground.shipped import shipped

BATCH = 32  # tasks of a step, where there are so many
TOY, SUMS, OWN = "toy", "sums", "own"
SLURM, KUBERNETES = "slurm", "kubernetes"
JOB = "/job"  # in pods: the files of the run
MACHINES = {
    "here": "this machine, shared out by rft",
    "torchrun": "this machine, ranks under torchrun",
    SLURM: "a job of Slurm's",
    KUBERNETES: "a Job and a Deployment",
}
REWARDS = {  # name: an answer that is right, of a reference answer
    OWN: "{}",
    "exact_match": "{}",
    "accuracy": "#### {}",
    "math": "{}",
    "math_boxed": "\\boxed{{{}}}",
    "gsm8k": "#### {}",
}


class Answers(NamedTuple):
    """`data`: keys of the taskset, its first rows as (prompt, reference answer), and `count`, how
    many it has, where that is known.
    """

    name: str
    model: str
    data: dict[str, Any]
    reward: str
    machine: str
    hours: float

    @property
    def is_sums(self) -> bool:
        return self.data["taskset"]["path"] == f"{SUMS}/train.jsonl"


def write(place: Path, answers: Answers, lengths: tuple[int, int], gpus: int) -> None:
    files = {
        "config.yaml": config(answers, *lengths),
        "rewards.py": reward(answers),
        "test_rewards.py": reward_test(answers),
        "run.sh": script(answers, gpus),
    }
    if answers.machine == KUBERNETES:
        files |= {name: manifest(name, answers) for name in ("trainer.yaml", "engines.yaml")}
    for name, text in files.items():
        (place / name).write_text(text, encoding="utf-8")
    (place / "run.sh").chmod(0o755)


def what_next(directory: Path, answers: Answers) -> str:
    files = "config.yaml, rewards.py and its test, run.sh"
    if answers.machine == KUBERNETES:
        files += ", trainer.yaml, engines.yaml"
    python, there = shlex.quote(sys.executable), shlex.quote(str(directory))
    return (
        f"{directory}: {files}\n"
        f"is the reward what you mean?\n    {python} -m pytest {there}\n"
        f"run (the same command again goes on from the newest checkpoint):\n    {there}/run.sh"
    )


# --- config.yaml ----------------------------------------------------------------------------------


def config(answers: Answers, prompt_tokens: int, response_tokens: int) -> str:
    inside = f"{JOB}/" if answers.machine == KUBERNETES else ""
    taskset = yaml.safe_dump(answers.data["taskset"], sort_keys=False).strip()
    return CONFIG.format(
        name=json.dumps(answers.name),
        model=json.dumps(answers.model),
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
        rate="1.0e-4" if answers.model == TOY else "1.0e-6",
        reward=f"{inside}rewards.py:reward",
        batch=min(BATCH, answers.data.get("count", BATCH)),
        taskset=taskset.replace("\n", "\n      "),
        held_out=HELD_OUT if answers.is_sums else "",
    )


CONFIG = """# A run of rft, made by `rft init`.
#   rft config --explain KEY             what a key means and takes
#   rft config --config config.yaml      what this file means
#   rft doctor --config config.yaml      would it run here?
defaults: rft
name: {name}
algorithm:
  algorithm_type: grpo
  repeat_times: 8 # answers to each task, which are compared with each other
  optimizer:
    lr: {rate}
model:
  model_path: {model}
  max_prompt_tokens: {prompt_tokens}
  max_response_tokens: {response_tokens}
buffer:
  batch_size: {batch} # tasks of a step
  total_epochs: 10 # the run ends after so many passes, or when the hours of run.sh are over
  explorer_input:
    default_reward_fn_type: {reward}
    taskset:
      {taskset}
{held_out}synchronizer:
  max_staleness: 1 # one batch is made while the one before is trained on
"""
HELD_OUT = """    eval_tasksets:
      - name: held_out
        path: sums/eval.jsonl
        format: {prompt_type: plaintext}
explorer:
  eval_interval: 25
"""


# --- the reward and its test ----------------------------------------------------------------------


def reward(answers: Answers) -> str:
    return OWN_REWARD if answers.reward == OWN else NAMED_REWARD.format(name=answers.reward)


OWN_REWARD = '''"""The reward of this run: rft calls `reward` for every answer.

Change it, and test_rewards.py with it. What it may read and return: docs/workflows.md of rft.
"""


def reward(response, truth, task, **args):
    """Entries are added up, and each is a metric: `right`, for an answer whose last word is the
    reference answer's; `short`, which makes a right answer in few words worth a little more.
    """
    said, wanted = response.split(), (truth or "").split()
    right = float(bool(said) and said[-1:] == wanted[-1:])
    return {"right": right, "short": 0.1 * right * (len(response) < 2000)}
'''
NAMED_REWARD = '''"""The reward of this run: rft's own `{name}` (`rft workflows {name}`).

Change it as you like. What it may read and return: docs/workflows.md of rft.
"""

from rft.rollout.rewards import REWARDS


def reward(response, truth, task, **args):
    return {{"{name}": REWARDS["{name}"](response, truth, task, **args)}}
'''


def reward_test(answers: Answers) -> str:
    rows = answers.data["rows"] or [("47+38=", "85"), ("10+10=", "20")]
    return REWARD_TEST.format(
        rows="".join(f"    ({prompt!r}, {truth!r}),\n" for prompt, truth in rows),
        form=REWARDS[answers.reward],
    )


REWARD_TEST = '''"""What the reward is worth, on the first tasks: `python -m pytest` runs it."""

import pytest
from rewards import reward
from rft.ground.experience import Sampling, Task

TASKS = [  # prompt, reference answer
{rows}]
RIGHT = {form!r}  # how an answer says the reference answer


def worth(response, prompt, truth):
    task = Task(id="test", taskset="test", row=0, prompt=prompt, truth=truth, sampling=Sampling())
    found = reward(response, truth, task)
    return sum(found.values()) if isinstance(found, dict) else found


@pytest.mark.parametrize(("prompt", "truth"), TASKS)
def test_a_right_answer_is_worth_more(prompt, truth):
    right = worth(RIGHT.format(truth), prompt, truth)
    for wrong in ("", "I do not know", RIGHT.format("-1234567")):
        assert right > worth(wrong, prompt, truth), wrong
'''


# --- run.sh ---------------------------------------------------------------------------------------


def script(answers: Answers, gpus: int) -> str:
    if answers.machine == KUBERNETES:
        return HEAD + kubernetes_script(answers)
    launch, clock = shipped("launch"), f"timeout --foreground --signal=TERM {answers.hours:g}h"
    python = f"export PYTHON=${{PYTHON:-{shlex.quote(sys.executable)}}}\n"
    if answers.machine == SLURM:
        minutes = max(1, round(answers.hours * 60))
        cards = f" --gpus-per-node={gpus}" if gpus else ""
        return (
            HEAD
            + python
            + SLURM_SCRIPT.format(
                name=answers.name,
                time=f"{minutes // 60}:{minutes % 60:02d}:00",
                cards=cards,
                launch=shlex.quote(str(launch / "slurm.sh")),
            )
        )
    if answers.machine == "torchrun":
        ranks = max(1, gpus // 2)
        start = f"{shlex.quote(str(launch / 'torchrun.sh'))} --config config.yaml"
        return (
            HEAD
            + python
            + f"export RANKS=${{RANKS:-{ranks}}}\n"
            + AFTER
            + f'exec {clock} {start} "$@"\n'
        )
    return (
        HEAD + python + AFTER + f'exec {clock} "$PYTHON" -m rft.train --config config.yaml "$@"\n'
    )


HEAD = """#!/usr/bin/env bash
# Made by `rft init`. More keys may follow: ./run.sh trainer.total_steps=10
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
"""
AFTER = """# When the time is over the run saves and ends, with 124; the same command goes on.
"""
SLURM_SCRIPT = """# One node, which rft shares out; for more: --nodes=3 (docs/launch.md of rft).
# Before the time is over the run saves, and the job goes back into the queue.
exec sbatch --nodes=1 --time={time} --job-name={name}{cards} \\
    {launch} --config config.yaml "$@"
"""


# --- Kubernetes -----------------------------------------------------------------------------------


def kubernetes_name(name: str) -> str:
    """As the API takes names."""
    return "rft-" + re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")


def kubernetes_script(answers: Answers) -> str:
    name = kubernetes_name(answers.name)
    return (
        "# Edit `image` and the GPUs in trainer.yaml and engines.yaml first. Model and data lie\n"
        "# on the claim `rft-runs`, which pods see as /runs. The secret rft-ray is made once:\n"
        '#   kubectl create secret generic rft-ray --from-literal=token="$(openssl rand -hex 32)"\n'
        f"kubectl create configmap {name} --from-file=config.yaml --from-file=rewards.py \\\n"
        "    --dry-run=client -o yaml | kubectl apply -f -\n"
        "kubectl apply -f trainer.yaml -f engines.yaml\n"
    )


def manifest(file: str, answers: Answers) -> str:
    """That of `launch/kubernetes`, with the run's files in every pod."""
    found = (shipped("launch") / "kubernetes" / file).read_text(encoding="utf-8")
    parts = list(yaml.safe_load_all(found))
    for part in parts:
        if "template" not in part["spec"]:
            continue
        pod = part["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        files = {"name": kubernetes_name(answers.name)}
        pod["volumes"].append({"name": "job", "configMap": files})
        container["volumeMounts"].append({"name": "job", "mountPath": JOB})
        if part["kind"] == "Job":
            ranks = [word for word in container["args"] if word.startswith("trainer.num_ranks=")]
            container["args"] = ["--config", f"{JOB}/config.yaml", *ranks]
            part["spec"]["activeDeadlineSeconds"] = round(answers.hours * 3600)
    said = f"# launch/kubernetes/{file} of rft, for this run. What to edit: docs/launch.md.\n"
    return said + yaml.safe_dump_all(parts, sort_keys=False, width=160)
