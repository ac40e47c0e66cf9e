"""`rft init DIR`: a directory from which a first run starts: config.yaml, rewards.py with its test,
run.sh for the machine that is here.

    answers ──► checked, all at once ──► a draft of DIR beside it ──► preflight ──► DIR

In: five answers, by options or asked for on a terminal. Out: DIR, and on stdout what to type next.
Invariants: DIR gets its name, or its files, when all are written and a look at the config refuses
nothing, so a start that was refused leaves nothing; what is there already is never touched.
"""

import argparse
import contextlib
import difflib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rft import config as configs
from rft import preflight
from rft.ground.errors import ConfigError, problems_of, refuse, refuse_all
from rft.run import cards
from rft.tools import init_files
from rft.tools.config import composed
from rft.tools.init_files import KUBERNETES, MACHINES, OWN, REWARDS, SLURM, SUMS, TOY, Answers

NAME = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")  # of a hub
PROMPTS = ("prompt", "question", "problem", "query", "instruction", "messages")
ANSWERS = ("response", "answer", "solution", "output", "target", "label")
SHOWN = 3  # rows that the reward's test has
MOST_HOURS = 10_000.0
LONGEST = 1024  # tokens of a prompt and of a response, where the model takes so many
SINFO_S = 10.0


@dataclass(frozen=True)
class Question:
    """`check(said, in_pods)` gives the answer as the files need it, or raises ConfigError;
    `in_pods`: paths are those that pods see, and nothing of them is seen here.
    """

    name: str
    asks: str
    default: Callable[[], str]
    check: Callable[[str, bool], Any]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="rft init",
        description="Write a config, a reward with its test and a launch script into a new "
        "directory. What is not said by an option is asked for on a terminal.",
        allow_abbrev=False,
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="new, or empty")
    for one in QUESTIONS:
        parser.add_argument(f"--{one.name}", help=one.asks)
    parser.add_argument("--yes", action="store_true", help="defaults for what is not said")
    options = parser.parse_args(argv)
    given = {one.name: getattr(options, one.name) for one in QUESTIONS}
    try:
        begin(options.directory, {k: v for k, v in given.items() if v is not None}, options.yes)
    except ConfigError as error:
        return refuse(error)
    except OSError as error:
        where = error.filename or options.directory
        said = error.strerror or error
        return refuse(ConfigError(f"{where}: {said}: name a directory that can be written"))
    except (KeyboardInterrupt, EOFError):
        print("\nrft init: nothing was written", file=sys.stderr)
        return 130
    return 0


def begin(directory: Path, given: dict[str, str], takes_defaults: bool) -> None:
    taken = [*problems_of(check_place, directory)]
    if takes_defaults or len(given) == len(QUESTIONS) or not sys.stdin.isatty():
        missing = [one for one in QUESTIONS if one.name not in given]
        if missing and not takes_defaults:
            names = ", ".join(f"--{one.name}" for one in missing)
            taken.append(f"{names}: not said, and nobody can be asked here: say it, or --yes")
        given = {one.name: one.default() for one in missing if takes_defaults} | given
        found, wrong = checked(given)
        refuse_all((*taken, *wrong.values()))
    else:
        refuse_all(taken)
        found = asked(given)
    answers = Answers(directory.resolve().name, **found)
    write(directory, answers)
    print(init_files.what_next(directory, answers))


def check_place(directory: Path) -> None:
    if directory.is_dir() and not any(directory.iterdir()):
        return
    if directory.exists() or directory.is_symlink():
        raise ConfigError(f"{directory}: is there already: name a directory that is new or empty")
    if not re.fullmatch(r"[\w.-]+", directory.resolve().name):
        raise ConfigError(
            f"{directory}: its name is that of the run: use letters, digits, `.`, `_`, `-`"
        )


# --- the five questions ---------------------------------------------------------------------------


def in_a_pod(option: str, said: str) -> str:
    if said.startswith("/") or NAME.fullmatch(said):
        return said
    raise ConfigError(
        f"--{option} {said}: pods do not see it: give a path that starts with /, as /runs/... of "
        "the claim, or a hub's org/name"
    )


def model(said: str, in_pods: bool) -> str:
    """A directory as it is named from everywhere, or a hub's name."""
    if in_pods:
        return in_a_pod("model", said)
    path = Path(said).expanduser()
    if said == TOY or (path / "config.json").is_file():
        return said if said == TOY else str(path.resolve())
    if path.exists():
        raise ConfigError(
            f"--model {said}: has no config.json: name the directory of a Hugging Face checkpoint, "
            f"a hub's org/name, or {TOY}"
        )
    if NAME.fullmatch(said):
        return said
    raise ConfigError(f"--model {said}: does not exist: name a directory, org/name, or {TOY}")


def data(said: str, in_pods: bool) -> dict[str, Any]:
    """The keys of a taskset, the first rows as (prompt, reference answer), and how many there are
    where that can be seen.
    """
    if in_pods:
        return {"taskset": {"path": in_a_pod("data", said)}, "rows": []}
    path = Path(said).expanduser()
    if said == SUMS:
        taskset = {"path": f"{SUMS}/train.jsonl", "format": {"prompt_type": "plaintext"}}
        return {"taskset": taskset, "rows": []}
    if not path.exists() and NAME.fullmatch(said) and not path.suffix:
        return {"taskset": {"path": said}, "rows": []}  # rft doctor looks at its columns
    found = rows_of(path, said)
    columns = [*found[0]]
    prompt, answer = (
        next((one for one in known if one in columns), None) for known in (PROMPTS, ANSWERS)
    )
    if prompt is None or answer is None:
        lacking = "prompt" if prompt is None else "reference answer"
        known = PROMPTS if prompt is None else ANSWERS
        raise ConfigError(
            f"--data {said}: no column is a {lacking}: there are {', '.join(columns)}; call it one "
            f"of {', '.join(known)}"
        )
    is_chat = isinstance(found[0][prompt], list)
    form = {"prompt_type": "messages" if is_chat else "plaintext"}
    form |= {"messages_key" if is_chat else "prompt_key": prompt, "response_key": answer}
    first = [found[number] for number in range(min(SHOWN, len(found)))]
    rows = [(row[prompt], str(row[answer])) for row in first if prompt in row and answer in row]
    taskset = {"path": str(path.resolve()), "format": form}
    return {"taskset": taskset, "rows": rows, "count": len(found)}


def rows_of(path: Path, said: str) -> Sequence[dict[str, Any]]:
    from rft.config import FormatConfig
    from rft.data import files

    try:
        chosen = files.data_files(str(path), "train", None, "--data")
        found = files.load_rows(chosen, "--data", FormatConfig())
        if len(found):
            found[0]  # which is read now
            return found
    except ConfigError as error:  # which names keys of a taskset
        named = (re.sub(r"^--data\.\w+", "--data", one) for one in error.problems)
        raise ConfigError(*named) from None
    except ValueError as error:
        raise ConfigError(f"--data {said}: cannot be read: {error}") from error
    raise ConfigError(f"--data {said}: has no rows")


def one_of(option: str, said: str, known: dict[str, str]) -> str:
    if said in known:
        return said
    near = difflib.get_close_matches(said, known, n=1)
    hint = f"did you mean `{near[0]}`? " if near else ""
    raise ConfigError(f"--{option} {said}: is unknown; {hint}there are {', '.join(known)}")


def hours(said: str, _: bool) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(said) <= MOST_HOURS:
            return float(said)
    raise ConfigError(f"--hours {said}: give a number of hours, as 8 or 0.5, up to {MOST_HOURS:g}")


def machine_here() -> str:
    """Slurm where there is a cluster to ask, else this machine."""
    return SLURM if gpus_of_slurm() is not None else "here"


def gpus_of_slurm() -> int | None:
    """GPUs of one of its nodes; None: there is no Slurm that answers."""
    if not (shutil.which("sbatch") and (sinfo := shutil.which("sinfo"))):
        return None
    try:
        told = subprocess.run(
            [sinfo, "--noheader", "--format=%G"],
            capture_output=True,
            text=True,
            timeout=SINFO_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):  # installed, and no cluster behind it
        return None
    return max(map(int, re.findall(r"gpu:(?:\w+:)?(\d+)", told.stdout)), default=0)


QUESTIONS = (
    Question(
        "model",
        f"a checkpoint's directory, a hub's org/name, or {TOY}: a tiny one with random weights",
        lambda: TOY,
        model,
    ),
    Question(
        "data", f"a file of tasks, a hub's org/name, or {SUMS}: of two numbers", lambda: SUMS, data
    ),
    Question(
        "reward",
        f"{', '.join(REWARDS)} ({OWN}: a function to edit)",
        lambda: OWN,
        lambda said, _: one_of("reward", said, REWARDS),
    ),
    Question(
        "machine",
        ", ".join(MACHINES),
        machine_here,
        lambda said, _: one_of("machine", said, MACHINES),
    ),
    Question("hours", "how long a start may run; it can be given again", lambda: "8", hours),
)


def checked(given: dict[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """(answers that can be used, what is wrong with each of the others)."""
    found, wrong = {}, {}
    in_pods = given.get("machine") == KUBERNETES
    for one in QUESTIONS:
        if one.name in given:
            try:
                found[one.name] = one.check(given[one.name], in_pods)
            except ConfigError as error:
                wrong[one.name] = " ".join(error.problems)
    return found, wrong


def asked(given: dict[str, str]) -> dict[str, Any]:
    """Ask for what is not given, and again for what cannot be used."""
    while True:
        for one in QUESTIONS:
            if one.name not in given:
                default = one.default()
                print(f"{one.name}: {one.asks}")
                given[one.name] = input(f"  [{default}] ").strip() or default
        found, wrong = checked(given)
        if not wrong:
            return found
        print("\n".join(wrong.values()), file=sys.stderr)
        given = {name: said for name, said in given.items() if name not in wrong}


# --- the directory --------------------------------------------------------------------------------


def write(directory: Path, answers: Answers) -> None:
    """All of it, or nothing. A directory that is there stays the same one: somebody may be in it,
    or something be mounted there.
    """
    directory = directory.resolve()
    is_there = directory.is_dir()
    directory.parent.mkdir(parents=True, exist_ok=True)
    beside = directory if is_there else directory.parent
    with TemporaryDirectory(prefix=f".{directory.name}-", dir=beside) as place:
        draft = Path(place) / directory.name
        draft.mkdir()
        write_toys(draft, answers)
        init_files.write(draft, answers, lengths(answers), numbers(answers))
        with contextlib.chdir(draft):
            refuse_all(looked_at(answers))
        if is_there:
            for part in sorted(draft.iterdir()):
                part.rename(directory / part.name)
        else:
            draft.rename(directory)


def write_toys(draft: Path, answers: Answers) -> None:
    """The tiny model and the sums, where they are asked for."""
    from rft.tools import toy

    if answers.model == TOY:
        toy.write_model(draft / TOY)
    if answers.is_sums:
        toy.write_arithmetic(draft / SUMS)


def lengths(answers: Answers) -> tuple[int, int]:
    """Tokens of a prompt and of a response."""
    if answers.model == TOY:
        return 16, 8
    file = Path(answers.model) / "config.json"
    told = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    context = int(told.get("max_position_embeddings") or 2 * LONGEST)
    return min(LONGEST, context // 2), min(LONGEST, context - context // 2)


def numbers(answers: Answers) -> int:
    """GPUs of this machine, or of a node of its Slurm."""
    if answers.machine == SLURM:
        return gpus_of_slurm() or 0
    return len(cards.here().visible)


def looked_at(answers: Answers) -> Iterator[str]:
    """What a start of config.yaml would refuse of the config itself, model and data; of a cluster
    whose files are not seen from here, what can be said without them.
    """
    raw = composed(["--config", "config.yaml"])
    if answers.machine != KUBERNETES:
        yield from problems_of(preflight.prepare, configs.stage_drafts(raw), False)
