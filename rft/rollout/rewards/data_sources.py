"""The reward of rows as veRL has them: by a function of the user's with veRL's signature, or by the
formula that veRL has for the row's data source.

In: a response and its task, whose row has `data_source`, `reward_model.ground_truth` and perhaps
`extra_info`. Out: (the score, numbers beside it, which become metrics). The function,
`compute_score(data_source, solution_str, ground_truth, extra_info)`, plain or async, gives a
number, or a dict with `score`. Invariant: a source without a formula here is refused by name, and a
row without its columns is an error, never a score of 0.
"""

import asyncio
import inspect
import re
import string
from collections.abc import Callable, Mapping
from typing import Any

from rft.ground.experience import Task
from rft.ground.plugins import lookup
from rft.rollout.rewards.text import last_boxed, penalty, tagged

Scored = tuple[float, dict[str, float]]
CLIPPED = 300  # characters at the end of a response that gsm8k and math_dapo look at
PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
MODULE = "pkg://"  # before a module's name, as veRL has it


def verl(
    response: str,
    truth: str | None,
    task: Task,
    response_tokens: int = -1,
    path: str | None = None,
    function: str = "compute_score",
    kwargs: Mapping[str, Any] | None = None,
    source_key: str = "data_source",
    overlong: int = 0,
    penalty_factor: float = 1.0,
    max_response_tokens: int | None = None,
) -> Scored:
    """`path`, `function`, `kwargs`: the user's own, and what it gets beside veRL's four arguments.

    `overlong`: of the tokens up to `max_response_tokens` the last ones cost, linearly, up to
    `penalty_factor` (Yu et al. 2025, arXiv:2503.14476, eq. 13, as veRL's manager `dapo` has it).
    """
    row = task.raw
    source, model, extra = row.get(source_key), row.get("reward_model"), row.get("extra_info")
    if source is None or not isinstance(model, Mapping) or "ground_truth" not in model:
        raise ValueError(
            f"task {task.id}: veRL's rows have `{source_key}` and `reward_model.ground_truth`, and "
            f"this one has {', '.join(row)}"
        )
    given = (source, response, model["ground_truth"], extra or {})
    if path is not None:
        found = own(path, function)(**dict(zip(PARAMETERS, given, strict=True)), **(kwargs or {}))
        found = given_value(found)
    else:
        found = formula(str(source))(response, model["ground_truth"])
    score, metrics = _parts(found)
    if overlong:
        metrics["overlong"] = penalty(
            task, response_tokens, max_response_tokens, overlong, penalty_factor
        )
        score += metrics["overlong"]
    return score, metrics


def given_value(found: Any) -> Any:
    """What a function gives that may be async."""

    async def value() -> Any:
        return await found

    return asyncio.run(value()) if inspect.isawaitable(found) else found


def _parts(found: Any) -> Scored:
    """(score, the numbers beside it) of what a function gives."""
    if not isinstance(found, Mapping):
        return float(found), {}
    if "score" not in found:
        raise ValueError(f"compute_score gave {', '.join(map(str, found))}, and no `score`")
    beside = {
        str(name): float(value)
        for name, value in found.items()
        if name != "score" and isinstance(value, bool | int | float)
    }
    return float(found["score"]), beside


def own(path: str, function: str) -> Callable[..., Any]:
    """The user's function; raises ConfigError where there is none."""
    found: Callable[..., Any] = lookup("reward", f"{path.removeprefix(MODULE)}:{function}", {})
    return found


def problem_of(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> str | None:
    """Why veRL's call would fail."""
    try:
        inspect.signature(function).bind(**dict.fromkeys((*PARAMETERS, *kwargs)))
    except TypeError as error:
        return f"it is called with {', '.join((*PARAMETERS, *kwargs))}: {error}"
    return None


# --- veRL's own formulas, by data source ----------------------------------------------------------


def formula(source: str) -> Callable[[str, Any], Any]:
    """Raises ValueError for a source that there is none for."""
    if source in SOURCES:
        return SOURCES[source]
    if source.startswith("aime"):
        return math_dapo
    known = ", ".join((*SOURCES, "aime*"))
    raise ValueError(
        f"data source {source!r} has no formula here: give custom_reward_function.path (known are "
        f"{known})"
    )


def gsm8k(response: str, truth: str) -> float:
    """1 when the last `#### number` of the response's end is the truth, commas aside."""
    said = re.findall(r"#### (-?[0-9.,]+)", response[-CLIPPED:])
    return float(bool(said) and said[-1].replace(",", "") == truth)


def boxed_math(response: str, truth: str) -> float:
    """1 when the last boxed answer and the truth are the same text once both are simplified
    (Hendrycks et al. 2021, arXiv:2103.03874, the data set's own comparison).
    """
    spaced = "\\boxed "
    if spaced in response:
        answer: str | None = response.rpartition(spaced)[2].split("$")[0]
    else:
        is_braced = response.rfind("\\boxed") == response.rfind("\\boxed{")
        answer = last_boxed(response) if is_braced else None
    if answer is None:
        return 0.0
    try:
        return float(simplified(answer) == simplified(truth))
    except ValueError:  # broken LaTeX
        return float(answer == truth)


def simplified(text: str) -> str:
    """MATH's form of an answer; raises ValueError where its LaTeX ends in the middle."""
    for old, new in (
        *((gone, "") for gone in ("\n", "\\!")),
        ("\\\\", "\\"),
        ("tfrac", "frac"),
        ("dfrac", "frac"),
        *((gone, "") for gone in ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$")),
    ):
        text = text.replace(old, new)
    text, *units = text.split("\\text{ ")
    if len(units) > 1:
        raise ValueError("two units")
    text = text.replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    text = f"0{text}" if text.startswith(".") else text
    left, *right = text.split("=")
    if len(right) == 1 and len(left) <= 2:
        text = right[0]
    if text.endswith("\\sqrt"):
        raise ValueError("a root of nothing")
    text = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", text).replace(" ", "")
    text = _with_braces(text)
    text = "\\frac{1}{2}" if text == "0.5" else text
    if ratio := re.fullmatch(r"(0|-?[1-9]\d*)/(0|-?[1-9]\d*)", text):
        return f"\\frac{{{ratio[1]}}}{{{ratio[2]}}}"
    return text


def _with_braces(text: str) -> str:
    """`\\frac12` as `\\frac{1}{2}`; the text as it was where a fraction is cut off."""
    first, *pieces = text.split("\\frac")
    if "" in pieces:
        raise ValueError("a fraction of nothing")
    done = first
    for piece in pieces:
        if piece[0] == "{":
            done += f"\\frac{piece}"
        elif len(piece) < 2:
            return text
        elif piece[1] == "{":
            done += f"\\frac{{{piece[0]}}}{piece[1:]}"
        else:
            done += f"\\frac{{{piece[0]}}}{{{piece[1]}}}{piece[2:]}"
    return done


def math_dapo(response: str, truth: str) -> dict[str, float]:
    """1 when what the response's end says behind its last `Answer:` is the truth, else -1; both in
    the form of Minerva (Lewkowycz et al. 2022, arXiv:2206.14858, appendix D.1).
    """
    said = re.findall(r"(?i)Answer\s*:\s*([^\n]+)", response[-CLIPPED:])
    is_right = minerva(said[-1] if said else "[INVALID]") == minerva(str(truth))
    return {"score": 1.0 if is_right else -1.0, "acc": float(is_right)}


REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
WORDS = r"""
square ways integers dollars mph inches hours km units \ldots sue points feet minutes digits cents
degrees cm gm pounds meters meals edges students childrentickets multiples \text{s} \text{.}
\text{}^2 \text{}^3 \text{} \mathrm{th} ^\circ ^{\circ} \; ,\! {,} " \dots
"""
REMOVED = ("\\text{\ns}", "\\text{\n}", *WORDS.split())
UNWRAPPED = (
    (r"(.*?)(\$)(.*?)(\$)(.*)", r"$\3$"),
    *((rf"(\\{word}\{{)(.*?)(\}})", r"\2") for word in ("text", "textbf", "overline")),
    (r"(\\boxed\{)(.*)(\})", r"\2"),
    (r"(frac)([^{])(.)", r"frac{\2}{\3}"),
    (r"(sqrt)([^{])", r"sqrt{\2}"),
)


def minerva(text: str) -> str:
    text = text.rpartition("=")[2]
    for old, new in (*REPLACED, *((gone, "") for gone in REMOVED)):
        text = text.replace(old, new)
    for pattern, new in UNWRAPPED:
        text = re.sub(pattern, new, text)
    text = text.replace("$", "")
    digits = text.replace(",", "")
    return (digits if digits.isdigit() else text).strip()


def found_answer(response: str, truth: Mapping[str, Any]) -> float:
    """1 when the last `<answer>` is one of the truth's targets, but for case, articles and
    punctuation; a quarter of it where tags are repeated more than ten times.
    """
    said = tagged(response, "answer")
    targets = truth["target"]
    targets = [targets] if isinstance(targets, str) else targets
    if not said or _bare(said[-1]) not in map(_bare, targets):
        return 0.0
    is_flooded = max(response.count("<answer>"), response.count("</answer>")) > 10
    return 0.25 if is_flooded else 1.0


def _bare(text: str) -> str:
    text = "".join(sign for sign in text.lower() if sign not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


SOURCES: dict[str, Callable[[str, Any], Any]] = {
    "openai/gsm8k": gsm8k,
    **dict.fromkeys(
        ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"),
        boxed_math,
    ),
    **dict.fromkeys(("math_dapo", "math", "math_dapo_reasoning"), math_dapo),
    **dict.fromkeys(
        [
            f"searchR1_{name}"
            for name in (
                "nq",
                "triviaqa",
                "popqa",
                "hotpotqa",
                "2wikimultihopqa",
                "musique",
                "bamboogle",
            )
        ],
        found_answer,
    ),
}
