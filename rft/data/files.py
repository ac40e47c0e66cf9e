"""Data files of tasksets and supervised rows: which ones a config means, whether every row is
usable, and the rows.

In: a path (a .jsonl, .json, .csv, .parquet or .arrow file, a directory of them, or what
`rft.data.remote` makes such files of), split, subset and format. `check_rows` streams the files
before anything expensive starts and refuses the first bad row; `load_rows` gives random access to
the rows, in the order of the files. JSON rows are read in place, exactly as written: the JSON
reader of `datasets` turns answers that look like dates into datetimes and adds empty fields. What
has columns goes through `datasets` (its memory-mapped Arrow copy is in HF_DATASETS_CACHE).

Every refusal is a `ConfigError` that names the config key, the file and line, and the fix.
"""

import difflib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rft.config import ConfigError, FormatConfig
from rft.data import formats, remote
from rft.data.lines import JsonRows, as_line, is_array, json_rows, parse_row
from rft.data.tables import TABLES, TableRows, load_table
from rft.ground.errors import unreadable

SUFFIXES = (".jsonl", ".json", *TABLES)
# what `datasets` leaves beside the data
ABOUT = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
CACHED = "cache-*.arrow"  # what was computed of it
SHARD = re.compile(r"-\d{5}-of-\d{5}(-[0-9a-f]+)?$")  # older ones with a hash
SPLITS = ("train", "test", "validation", "eval", "dev")
ALSO = {"training": "train", "testing": "test", "val": "validation", "valid": "validation"}
ALSO |= {"evaluation": "eval"}
_messages_decoder = msgspec.json.Decoder(list[dict[str, Any]])


@dataclass(frozen=True)
class Needs:
    """Which columns a reader of rows needs, by the config key that names each."""

    text: dict[str, str]  # "prompt_key" -> "question": must be text (or a number, for answers)
    # "messages_key" -> "messages": a list of chat messages
    messages: dict[str, str] = field(default_factory=dict)
    # the same, and the assistant has the last word
    answers: dict[str, str] = field(default_factory=dict)
    # "tools_key" -> "tools": a list of objects, or nothing
    tools: dict[str, str] = field(default_factory=dict)
    # of a task: the first of these columns that a row has is text, or a list of chat messages
    prompts: dict[str, str] = field(default_factory=dict)
    is_spoken: bool = False  # such a prompt is what the model answers
    values: dict[str, str] = field(default_factory=dict)  # whatever they hold
    # of pairs, whose two answers are `answers`: their prompt, which they may begin with instead
    pairs: dict[str, str] = field(default_factory=dict)

    @property
    def columns(self) -> dict[str, str]:
        """Those that every row must have."""
        return self.text | self.messages | self.answers | self.values

    @property
    def all(self) -> dict[str, str]:
        """Those that are looked at."""
        return self.columns | self.prompts | self.tools | self.pairs


def task_needs(config: FormatConfig, key: str, prompt: bool = True, answer: bool = True) -> Needs:
    """Columns of a taskset: prompt and answer, or messages.

    `prompt`, `answer`: whether the workflow and the reward read them; a column that the config
    names is there in any case.
    """
    form = formats.of(config, key)
    tools = {"tools_key": config.tools_key} if config.tools_key else {}
    if config.prompt_type is not None and form.base == "messages":
        said = {"messages_key": config.messages_key}
        return Needs({}, messages=said, tools=tools, is_spoken=prompt)
    text = {"system_prompt_key": config.system_prompt_key} if config.system_prompt_key else {}
    values: dict[str, str] = {}
    if config.response_key or (answer and form.base == "plaintext"):
        (text if answer else values)["response_key"] = config.response_column
    prompts = prompt_columns(config) if config.prompt_key or prompt else {}
    return Needs(text, prompts=prompts, values=values, tools=tools, is_spoken=prompt)


def prompt_columns(config: FormatConfig) -> dict[str, str]:
    """Where a task's prompt is, by the key that names the column: in the first that a row has."""
    has_messages = formats.has_messages(config)
    if config.prompt_type is not None and has_messages:
        return {"messages_key": config.messages_key}
    text = {"prompt_key": config.prompt_column}
    return {"messages_key": config.messages_key} | text if has_messages else text


MISSING = object()


def at(row: Any, column: str) -> Any:
    """What stands in a column, or inside one (`reward_model.ground_truth`, `choices.0`); MISSING
    where nothing does.
    """
    if column in row:
        return row[column]
    found: Any = row
    for word in column.split("."):
        if isinstance(found, list) and word.isdecimal() and int(word) < len(found):
            found = found[int(word)]
        elif isinstance(found, dict) and word in found:
            found = found[word]
        else:
            return MISSING
    return found


def encoded(row: dict[str, msgspec.Raw], column: str) -> bytes | None:
    """`at` of a row whose columns are still encoded."""
    if column in row:
        return bytes(row[column])
    first, *inside = column.split(".")
    if not inside or first not in row:
        return None
    found = at({first: msgspec.json.decode(row[first])}, column)
    return None if found is MISSING else msgspec.json.encode(found)


def data_files(path: str, split: str, subset: str | None, key: str) -> list[Path]:
    """The files that `path` means: itself, or those in the directory that belong to the split,
    sorted by name.
    """
    if source := remote.source_of(path, SUFFIXES):
        return _of_one_kind(remote.files(source, split, subset, key), path, split, key)
    root = Path(path)
    if said := unreadable(root):
        raise ConfigError(f"{key}.path: {said}")
    if not root.exists():
        near = difflib.get_close_matches(root.name, [p.name for p in root.parent.glob("*")], 1)
        hint = f"; did you mean {root.parent / near[0]}?" if near else ""
        raise ConfigError(
            f"{key}.path: {path} does not exist{hint}; give a file, a directory, org/name of a "
            "hub's data set, or a URL"
        )
    if root.is_file():
        if root.suffix not in SUFFIXES:
            raise ConfigError(
                f"{key}.path: {path} is no {', '.join(SUFFIXES)} file: convert it to JSON lines"
            )
        return [root]
    if subset is not None:
        folders = sorted(p.name for p in root.iterdir() if p.is_dir())
        if subset not in folders:
            raise ConfigError(
                f"{key}.subset_name: no directory {subset!r} in {path}; there are: {folders}"
            )
        root = root / subset
    files = sorted(
        p
        for suffix in SUFFIXES
        for p in [*root.glob(f"*{suffix}"), *root.glob(f"*/*{suffix}")]
        if p.name not in ABOUT and not p.match(CACHED)
    )
    named = [p for p in files if split_of(p.relative_to(root)) == ALSO.get(split, split)]
    unnamed = [p for p in files if split_of(p.relative_to(root)) is None and p.parent == root]
    of_name = [p for p in files if split in (SHARD.sub("", p.stem), p.parent.name)]  # train_prefs
    found = named or of_name or (unnamed if split == "train" else [])
    if not found:
        there = sorted(str(p.relative_to(root)) for p in files)[:8] or "none"
        raise ConfigError(
            f"{key}.split: no {', '.join(SUFFIXES)} file of split {split!r} in {root}; "
            f"data files: {there}"
        )
    return _of_one_kind(found, str(root), split, key)


def _of_one_kind(found: list[Path], where: str, split: str, key: str) -> list[Path]:
    if len({p.suffix for p in found}) > 1:
        raise ConfigError(
            f"{key}.path: {where} mixes file types for split {split!r}: "
            f"{[p.name for p in found]}; keep one"
        )
    if found[0].suffix not in SUFFIXES:
        raise ConfigError(
            f"{key}.path: {found[0].name} of {where} is no {', '.join(SUFFIXES)} file: convert it "
            "to JSON lines"
        )
    return found


def split_of(path: Path) -> str | None:
    """The split that a file's or its folder's name tells: train-00000-of-00002.parquet, test.jsonl,
    train/a.jsonl.
    """
    words = " ".join(path.parts)
    for separator in "-_.":
        words = words.replace(separator, " ")
    said = (ALSO.get(word, word) for word in words.lower().split())
    return next((word for word in said if word in SPLITS), None)


def load_rows(
    files: list[Path], key: str, config: FormatConfig | None = None
) -> Sequence[dict[str, Any]]:
    """All rows, by number; not in memory, except for .json arrays. `config`: what columns mean."""
    if files[0].suffix in TABLES:
        if config is None:
            return load_table(files, key)
        return TableRows(load_table(files, key, config.columns), config)
    if any(is_array(file) for file in files):
        rows = [
            json.loads(file.read_text("utf-8")) if is_array(file) else list(JsonRows([file]))
            for file in files
        ]
        return [row for part in rows for row in part]
    return JsonRows(files)


def check_rows(files: list[Path], needs: Needs, key: str) -> int:
    """Refuse the first row that cannot be used; returns the number of rows."""
    count, tools = 0, set(needs.tools.items())
    for file in files:
        if file.suffix == ".parquet":
            count += check_parquet(file, needs, key)
        elif file.suffix in TABLES:
            count += check_table(file, needs, key)
        else:
            for where, row in json_rows(file, key):
                check_row(row, where, needs, key)
                tools -= {(name, column) for name, column in tools if encoded(row, column)}
                count += 1
    if count == 0:
        raise ConfigError(f"{key}.path: no rows in {', '.join(map(str, files))}: the file is empty")
    for name, column in tools if files[0].suffix not in TABLES else ():
        raise ConfigError(
            f"{key}.format.{name}: no row has a {column!r}: leave it out, or name the right column"
        )
    return count


def check_formed(files: list[Path], needs: Needs, key: str, config: FormatConfig) -> int:
    """The same, where a plug-in makes the columns that are needed."""
    if not formats.of(config, key).translates:
        return check_rows(files, needs, key)
    count_rows(files, key)
    where = ", ".join(map(str, files))
    return check_made(
        formats.translated(load_rows(files, key, config), config, key, where), where, needs, key
    )


def check_made(rows: Sequence[dict[str, Any]], where: str, needs: Needs, key: str) -> int:
    """Refuse the first row that cannot be used, of rows that are not read from JSON lines."""
    for number, row in enumerate(rows, 1):
        at_row = f"{where} row {number}"
        check_row(parse_row(as_line(row, at_row, key), at_row, key), at_row, needs, key)
    if not len(rows):
        raise ConfigError(f"{key}.path: no rows in {where}: the table is empty")
    return len(rows)


def count_rows(files: list[Path], key: str) -> int:
    """The number of rows, without a look into them."""
    return check_rows(files, Needs({}), key)


def check_row(row: dict[str, msgspec.Raw], where: str, needs: Needs, key: str) -> None:
    found = {name: encoded(row, column) for name, column in needs.all.items()}
    for name, column in needs.columns.items():
        if found[name] is None:
            refuse_column(name, column, row, where, key)
    for name, column in needs.text.items():
        value = bytes(found[name] or b"")
        number = name == "response_key" and (value[:1].isdigit() or value[:1] == b"-")
        if value[:1] != b'"' and not number:
            raise ConfigError(
                f"{key}.format.{name}: {where} "
                f"has {value[:40].decode(errors='replace')} as {column!r}, "
                "which must be text"
            )
    for name, column in (needs.messages | needs.answers).items():
        raw = bytes(found[name] or b"")
        problem = messages_problem(raw, name in needs.answers)
        if needs.is_spoken and name in needs.messages:
            problem = problem or answered_problem(raw)
        if problem:
            raise ConfigError(f"{key}.format.{name}: {where}: {column!r} {problem}")
    if needs.prompts:
        check_prompt(needs, found, row, where, key)
    for name in needs.pairs:
        check_pair(name, needs, found, where, key)
    for name, column in needs.tools.items():
        if found[name] is not None and not is_list_of_tools(bytes(found[name] or b"")):
            raise ConfigError(
                f"{key}.format.{name}: {where}: "
                f"{column!r} must be a list of tools, each an object, or that as JSON text"
            )


def check_prompt(
    needs: Needs, found: dict[str, bytes | None], row: Iterable[str], where: str, key: str
) -> None:
    """The first of `needs.prompts` that the row has is text, or a list of chat messages."""
    columns = needs.prompts
    there = [name for name in columns if found[name] is not None]
    if not there:
        refuse_prompt(columns, row, where, key)
    # Arrow writes null where another row has a column
    name = next((one for one in there if found[one] != b"null"), there[-1])
    value, column = bytes(found[name] or b""), columns[name]
    if name == "prompt_key" and value[:1] == b'"':
        return
    problem = messages_problem(value, False)
    if problem and name == "prompt_key":
        raise ConfigError(
            f"{key}.format.{name}: {where} has {value[:40].decode(errors='replace')} as "
            f"{column!r}, which must be text, or a list of chat messages"
        )
    if problem := problem or (needs.is_spoken and answered_problem(value)):
        raise ConfigError(f"{key}.format.{name}: {where}: {column!r} {problem}")


def check_pair(
    name: str, needs: Needs, found: dict[str, bytes | None], where: str, key: str
) -> None:
    """Of messages; `name`: the key of the column of the prompt, if there is one."""
    raw = found[name] or b"null"
    if raw != b"null" and (problem := messages_problem(raw, False)):
        raise ConfigError(f"{key}.format.{name}: {where}: {needs.pairs[name]!r} {problem}")
    prompt, chosen, rejected = (
        None if one == b"null" else _messages_decoder.decode(unquoted(one))
        for one in (raw, *(bytes(found[answer] or b"") for answer in needs.answers))
    )
    try:
        pair_of(prompt, chosen or [], rejected or [])
    except ValueError as error:
        raise ConfigError(f"{key}.format.{name}: {where}: {error}") from error


def pair_of(
    prompt: list[dict[str, Any]] | None,
    chosen: list[dict[str, Any]],
    rejected: list[dict[str, Any]],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """Prompt and two answers. Where chosen and rejected are whole dialogues, which do not begin
    with the assistant, what both begin with is the prompt. Raises ValueError.
    """
    answers = (chosen, rejected)
    if all(answer[0]["role"] != "assistant" for answer in answers):
        most = min(map(len, answers)) - 1
        count = next((n for n in range(most) if chosen[n] != rejected[n]), most)
        prompt, chosen, rejected = chosen[:count], chosen[count:], rejected[count:]
    if any(answer[0]["role"] != "assistant" for answer in (chosen, rejected)):
        raise ValueError(
            "chosen and rejected must both be the assistant's answer, or both whole dialogues that "
            "are the same up to it"
        )
    if not prompt:
        raise ValueError(
            "there is no prompt: name its column, or let chosen and rejected begin with it"
        )
    if prompt[-1]["role"] == "assistant":
        raise ValueError(
            "the prompt ends with the assistant's words, which chosen and rejected have: end it "
            "before them, or name the right column"
        )
    return prompt, chosen, rejected


def refuse_prompt(columns: dict[str, str], there: Iterable[str], where: str, key: str) -> None:
    """None of the columns is there: the one is told whose name is nearest to what is."""
    keys = list(there)
    near = [name for name, one in columns.items() if difflib.get_close_matches(one, keys, 1)]
    name = [*near, *reversed(columns)][0]
    refuse_column(name, columns[name], keys, where, key)


def messages_problem(raw: bytes, ends_with_assistant: bool) -> str | None:
    """What is wrong with a JSON value that should be chat messages, or JSON text of them."""
    try:
        messages = _messages_decoder.decode(unquoted(raw))
    except msgspec.DecodeError:
        return (
            'must be a list of messages {"role": ..., "content": ...}; for a plain text use '
            "format.prompt_type=plaintext"
        )
    if not messages or not all(isinstance(message.get("role"), str) for message in messages):
        there = f"; the first has {', '.join(map(repr, messages[0]))}" if messages else ""
        return f'needs at least one message, and "role" and "content" in each{there}'
    for message in messages:
        if problem := content_problem(message):
            return problem
    if ends_with_assistant and messages[-1]["role"] != "assistant":
        return (
            f"ends with role {messages[-1]['role']!r}, "
            "but supervised rows must end with the assistant's answer"
        )
    return None


def answered_problem(raw: bytes) -> str | None:
    """Of the messages of a task, which end where the model is to speak."""
    if _messages_decoder.decode(unquoted(raw))[-1]["role"] != "assistant":
        return None
    return (
        "ends with the assistant's words, so the model would be shown an answer: end it before, or "
        "name the column of the question"
    )


def content_problem(message: dict[str, Any]) -> str | None:
    """A message's content is a text, or parts of one as OpenAI has them; a call of tools may do
    without.
    """
    content, calls = message.get("content"), message.get("tool_calls")
    if content is None and not calls:
        return 'needs "role" and "content" in each message (or "tool_calls")'
    parts = content if isinstance(content, list) else [{"text": content or ""}]
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        return f"has content that is no text: {str(content)[:60]}"
    for call in calls or []:
        asked = call.get("function", call) if isinstance(call, dict) else None
        arguments = asked.get("arguments") if isinstance(asked, dict) else MISSING
        if arguments is MISSING or isinstance(arguments, str) and not is_json(arguments or "{}"):
            return f"has a call that is none of a function with arguments in JSON: {call}"[:160]
    return None


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def is_list_of_tools(raw: bytes) -> bool:
    """A row without tools may say so by null."""
    try:
        return raw == b"null" or all(_messages_decoder.decode(unquoted(raw)))
    except msgspec.DecodeError:
        return False


def unquoted(raw: bytes) -> bytes:
    """The JSON that a JSON text holds; any other value as it is."""
    return msgspec.json.decode(raw, type=str).encode() if raw.startswith(b'"') else raw


def parsed(value: Any) -> Any:
    """A column's list of objects, which may be written as JSON text."""
    return json.loads(value) if isinstance(value, str) else value


def check_parquet(file: Path, needs: Needs, key: str) -> int:
    """First the schema, which refuses a wrong column without reading it; then every value of the
    columns that are needed.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as parquet:
            check_schema(parquet.schema_arrow, file, needs, key)
            there = set(parquet.schema_arrow.names)
            wanted = read_columns(needs, there)
            _check_batches(parquet.iter_batches(columns=wanted) if wanted else (), file, needs, key)
            return int(parquet.metadata.num_rows)
    except pyarrow.ArrowInvalid as error:
        raise ConfigError(f"{key}.path: {file} is not a parquet file ({error})") from error


def read_columns(needs: Needs, there: set[str]) -> list[str]:
    """Of those that are looked at, whole ones also where something inside is meant."""
    columns = {one if one in there else one.split(".")[0] for one in needs.all.values()}
    return sorted(columns & there)


def check_table(file: Path, needs: Needs, key: str) -> int:
    """A file that has its columns in rows."""
    rows = load_table([file], key, needs.all.values())
    check_schema(rows.features.arrow_schema, file, needs, key)
    wanted = read_columns(needs, set(rows.column_names))
    batches = rows.select_columns(wanted).with_format("arrow").iter(1000) if wanted else ()
    _check_batches(batches, file, needs, key)
    return len(rows)


def _check_batches(batches: Iterable[Any], file: Path, needs: Needs, key: str) -> None:
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            encoded = {
                column: msgspec.Raw(msgspec.json.encode(value)) for column, value in row.items()
            }
            check_row(encoded, f"{file} row {number}", needs, key)


def check_schema(schema: Any, file: Path, needs: Needs, key: str) -> None:
    import pyarrow.types as types

    columns = {field.name: field.type for field in schema}
    there = {n: c for n, c in needs.prompts.items() if {c, c.partition(".")[0]} & columns.keys()}
    if needs.prompts and not there:
        refuse_prompt(needs.prompts, columns, str(file), key)
    there |= {n: c for n, c in needs.pairs.items() if c in columns}
    for name, column in needs.tools.items():
        if not {column, column.partition(".")[0]} & columns.keys():
            refuse_column(name, column, columns, str(file), key)
    for name, column in (needs.columns | there).items():
        if column not in columns and column.partition(".")[0] in columns:
            continue  # inside another column: each value is looked at
        if column not in columns:
            refuse_column(name, column, columns, str(file), key)
        kind = columns[column]
        text = types.is_string(kind) or types.is_large_string(kind)
        number = name == "response_key" and (types.is_integer(kind) or types.is_floating(kind))
        messages = types.is_list(kind) or types.is_large_list(kind)
        if name not in needs.values and not (text or (number if name in needs.text else messages)):
            is_text = name in needs.text or name == "prompt_key"
            kinds = "text" if is_text else "a list of messages"
            raise ConfigError(
                f"{key}.format.{name}: column {column!r} of {file} is {kind}, but must be {kinds}"
            )


def refuse_column(name: str, column: str, there: Iterable[str], where: str, key: str) -> None:
    keys = list(there)
    near = difflib.get_close_matches(column, keys, 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(
        f"{key}.format.{name}: {where} has no {column!r}; "
        f"there are {', '.join(map(repr, keys)) or 'no keys'}. "
        f"{hint}Set {key}.format.{name} to the right one, or add {column!r} to the row"
    )
