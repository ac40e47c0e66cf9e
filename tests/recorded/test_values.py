"""Every key takes and refuses what it took and refused at 8c2d7f2, and a refusal names the key as
it did then.

A value that was met with a traceback then may be refused now, and so may a number that is none
and an empty word, which were taken where nothing looked at them. The whole table takes minutes;
`make test` looks at every 60th row.
"""

import functools
import json
import re
from pathlib import Path

import pytest

from tests.recorded import entry, values
from tests.recorded.values import Row

ROWS, CHUNK = values.read(), 200
OF_OMEGACONF = re.compile(
    "could not be converted|Cannot (merge|convert|assign)|is not Optional|is not a valid bool|"
    "is not a subclass|Incompatible value|Invalid (value|type) assigned"
)
NONSENSE = ("nan", "''")
FILES = (
    "buffer.explorer_input.taskset",
    "buffer.trainer_input.experience_buffer",
    "buffer.trainer_input.auxiliary_buffers.sft_dataset",
)
ELSE = {  # what is wrong first is said of another key now, or of what a user meant
    ("stages", "[{zz:1}]"),
    ("explorer.auxiliary_models[].model_path", "x"),  # its own, where it was the policy's
    ("+buffer.trainer_input.auxiliary_buffers", "{zz:1}"),
    ("buffer.trainer_input.auxiliary_buffers.sft_dataset.storage_type", "zz"),
    ("buffer.trainer_input.auxiliary_buffers.sft_dataset.path", "null"),
    ("buffer.explorer_input.default_workflow_type", "math_workflow"),  # Trinity-RFT's name
    ("buffer.explorer_input.eval_tasksets[].rollout_args", "{zz:1}"),
    ("buffer.explorer_input.eval_tasksets[].format", "{prompt_key:zz}"),
    ("algorithm", "zz"),  # of a recipe rft says itself which there are
    ("monitor", "zz"),
    *(("algorithm.kl_penalty_fn", name) for name in ("k1", "k2", "abs")),  # fewer are advised
}
REWORDED = {
    " (a local file or directory; rft downloads nothing)": "",
    "(the likeliest token) or more": "(the likeliest token)",
    "the local directory of": "the directory, or hub name, of",
}
# names behind it may be more, and in any order
NAMES = re.compile(r" (?:Known:|known are|use all-linear or some of) ")
MENDED = {  # what is decided otherwise since
    "refused": {
        ("buffer.explorer_input.taskset.rollout_args.temperature", "0"),  # was trained
        # every response was left out, or none could be
        *(
            ("algorithm.rollout_correction.rollout_token_veto_threshold", ratio)
            for ratio in ("2", "-1")
        ),
        ("+buffer.explorer_input.taskset.workflow_args", "{zz:1}"),  # none knows it
        # of rows, which are messages then
        *((f"{place}.format.prompt_type", value) for place in FILES for value in ("null", "''")),
        # a column that no row has was no column
        *((f"{FILES[1]}.format.tools_key", name) for name in ("abc", "123", "1.5", "true")),
        # a store is tried out before the start
        *(("trainer.checkpoint.storage", url) for url in ("file:///nowhere", "s3://a/b")),
        # units of three layers, and there are four: Megatron asked for a fifth
        *(("trainer.recompute_num_layers", count) for count in ("3", "'3'")),
    },
    "accepted": {
        ("+buffer.trainer_input.auxiliary_buffers", "{}"),  # the recipe's own stay
        # experiences of one update of several
        *(("buffer.train_batch_size", count) for count in ("3", "'3'")),
        # null is what the machine, or the row, says
        *(
            (f"{place}.format.{column}", value)
            for place in FILES
            for column in ("prompt_type", "prompt_key", "response_key")
            for value in ("null", "''")
        ),
        *(
            (key, "null")
            for key in (
                "cluster.colocate",
                "explorer.runner_per_model",
                "explorer.rollout_model.engine_num",
                "explorer.rollout_model.max_num_seqs",
                "explorer.rollout_model.enforce_eager",
                "explorer.auxiliary_models[].name",
                "trainer.dtype",
            )
        ),
    },
}


@pytest.fixture(autouse=True)
def nothing_of_the_machine(recipes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry.leave_the_machine(monkeypatch, recipes)


def test_a_sample_of_values_is_taken_or_refused_as_it_was(recipes: Path) -> None:
    rows = ROWS[::60]
    now = [values.judged(row, recipes) for row in rows]
    assert [pair for pair in zip(rows, now, strict=True) if not same(*pair)] == []


@pytest.mark.verify
@pytest.mark.parametrize("start", range(0, len(ROWS), CHUNK))
def test_values_are_taken_or_refused_as_they_were(recipes: Path, start: int) -> None:
    assert [pair for pair in judged(start, recipes) if not same(*pair)] == []


@pytest.mark.verify
@pytest.mark.parametrize("start", range(0, len(ROWS), CHUNK))
def test_what_rft_said_of_them_it_still_says(recipes: Path, start: int) -> None:
    """Its sentences, perhaps among others; those of OmegaConf need not stay."""
    said = [
        pair
        for pair in judged(start, recipes)
        if pair[0].verdict == "refused"
        and pair[0].value not in NONSENSE
        and (pair[0].key, pair[0].value) not in ELSE
        and (pair[0].key, pair[0].value) not in MENDED.get(pair[1].verdict, ())
        and not OF_OMEGACONF.search(pair[0].text)
    ]
    assert [pair for pair in said if not still_said(*(row.text for row in pair))] == []


def still_said(then: str, now: str) -> bool:
    """A number is shown as it was written (-1, not -1.0); what else it could be (none at all, one
    of more names) may be added or go.
    """
    then, now = (re.sub(r"(=-?\d+)\.0\b", r"\1", text) for text in (then, now))
    for old, new in REWORDED.items():
        then = then.replace(old, new)
    then, *names = NAMES.split(then, maxsplit=1)
    return then.removesuffix(", or left out") in now and all(
        name in now for name in re.split("[,;] ", "".join(names).rstrip("."))
    )


@functools.cache
def judged(start: int, root: Path) -> list[tuple[Row, Row]]:
    """Rows as they were and as they are."""
    return [(row, values.judged(row, root)) for row in ROWS[start : start + CHUNK]]


def same(then: Row, now: Row) -> bool:
    if then.verdict == "crashed":
        return now.verdict in ("crashed", "refused")
    if (then.key, then.value) in MENDED.get(now.verdict, ()):
        return True
    if then.verdict != now.verdict:
        return then.value in NONSENSE and (then.verdict, now.verdict) == ("accepted", "refused")
    if then.verdict == "accepted":
        return then.text == now.text or json.loads(then.text) == json.loads(now.text)
    return named(then) <= named(now)


def named(row: Row) -> set[str]:
    """Of the key and its last word those that the sentence has."""
    words = (row.name, row.name.rpartition(".")[2])
    return {word for word in words if re.search(rf"(?<!\w){re.escape(word)}(?!\w)", row.text)}
