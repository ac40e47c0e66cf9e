"""`rft chat RUN`: talk to the model that a run exported, in the terminal.

In: a run's directory (its newest export), `RUN@STEP`, or a directory in Hugging Face form; then a
line per turn. Out: its answers as they come. The conversation is what the model's own template
makes of all turns; an empty line begins another one, the end of the input (Ctrl-D) ends it. Reads
the directory and writes nothing; on this machine's processor, so that a run's cards stay free.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from rft.run.stages import exports
from rft.tools.places import InputError, jobs_below


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="rft chat", description=__doc__)
    parser.add_argument("run", metavar="RUN", help="a run, RUN@STEP, or a model's directory")
    parser.add_argument("--system", help="what the model is told first")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default): greedy")
    parser.add_argument("--max-tokens", type=int, default=256, help="of one answer")
    given = parser.parse_args(arguments)
    if given.max_tokens < 1 or not given.temperature >= 0:
        parser.error("--max-tokens is at least 1, --temperature at least 0")
    try:
        talk(find_model(given.run), given)
    except InputError as error:
        print(f"rft chat: {error}", file=sys.stderr)
        return 1
    return 0


def find_model(text: str) -> Path:
    """Raises InputError when there is none, or more than one run."""
    where, _, number = text.rpartition("@")
    path, step = (Path(where), int(number)) if where and number.isdigit() else (Path(text), None)
    if not path.is_dir():
        raise InputError(f"{path}: no such directory")
    if (path / "config.json").is_file() and step is None:
        return path
    found = {job: exports(job) for job in (path, *jobs_below(path)) if exports(job)}
    if not found:
        raise InputError(
            f"{path}: no exported model here yet; a run exports at its end and with every "
            f"checkpoint by trainer.save_hf_checkpoint=always, and now by "
            f"`rft ckpt export {path} DIRECTORY --to hf`"
        )
    if len(found) > 1:
        raise InputError(f"{path} holds {len(found)} runs, give one: {', '.join(map(str, found))}")
    ((job, made),) = found.items()
    for at, model in reversed(made):
        if step in (None, at):
            return model
    raise InputError(f"{job}: no export of step {step}; there are {[at for at, _ in made]}")


def talk(model: Path, given: argparse.Namespace) -> None:
    """Until the input ends."""
    # neither is wanted where the directory is wrong
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
        answerer = AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(f"{model} cannot be read: {' '.join(str(error).split())}") from error
    first = [{"role": "system", "content": given.system}] if given.system else []
    turns = list(first)
    if sys.stdin.isatty():
        print(f"{model}; an empty line begins anew, Ctrl-D ends")
    while (line := ask()) is not None:
        if not line:
            turns = list(first)
            continue
        turns.append({"role": "user", "content": line})
        turns.append({"role": "assistant", "content": answer(answerer, tokenizer, turns, given)})


def ask() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None


def answer(
    model: Any, tokenizer: Any, turns: list[dict[str, str]], given: argparse.Namespace
) -> str:
    """Printed as it comes; returned whole."""
    from transformers import TextStreamer

    if tokenizer.chat_template:
        said = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
        asked = tokenizer.apply_chat_template(turns, **said)
    else:
        asked = tokenizer("\n".join(turn["content"] for turn in turns), return_tensors="pt")
    how = {"do_sample": given.temperature > 0, "max_new_tokens": given.max_tokens}
    if given.temperature > 0:
        how["temperature"] = given.temperature
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    made = model.generate(**asked, **how, streamer=streamer)
    return tokenizer.decode(made[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)
