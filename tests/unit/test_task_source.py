"""Tasks from a table, and what a row says of its own workflow and reward."""

import json
import pickle
import sqlite3
from pathlib import Path

import pytest

from rft.config import ConfigError, FormatConfig, TasksetConfig
from rft.data.source import names_in
from rft.data.taskset import TaskDefaults, Taskset, check_taskset

KEY = "buffer.explorer_input.taskset"
DEFAULTS = TaskDefaults("single_turn", "exact_match", 1, 8, 1.0)
PLAIN = FormatConfig(prompt_type="plaintext")


def table(path: Path, name: str, columns: str, rows: list[tuple[object, ...]]) -> Path:
    with sqlite3.connect(path) as connection:
        connection.execute(f'create table "{name}" ({columns})')
        marks = ", ".join("?" * (columns.count(",") + 1))
        connection.executemany(f'insert into "{name}" values ({marks})', rows)
    connection.close()
    return path


def test_rows_of_a_table_are_tasks(tmp_path: Path) -> None:
    """In the order of their row ids; nothing is left out at the
    end, and the file is never written to.
    """
    path = table(
        tmp_path / "a.db",
        "sums",
        "prompt text, response text",
        [(f"{n}+1", str(n + 1)) for n in range(7)],
    )
    before = path.read_bytes()
    config = TasksetConfig(
        storage_type="sql", path=f"sqlite:///{path}", format=PLAIN, shuffle=False
    )
    assert check_taskset(config, f"{KEY}.path") == Taskset.count(config) == 7
    tasks = pickle.loads(pickle.dumps(Taskset(config, DEFAULTS)))
    found = list(tasks)
    assert [(task.prompt, task.truth) for task in found] == [
        (f"{n}+1", str(n + 1)) for n in range(7)
    ]
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_messages_and_whole_rows_are_json_in_a_table(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "1+1"}]
    path = table(
        tmp_path / "a.db", "m", "messages text, response text", [(json.dumps(messages), "2")]
    )
    config = TasksetConfig(storage_type="sql", path=str(path))
    assert check_taskset(config, f"{KEY}.path") == 1
    assert next(Taskset(config, DEFAULTS)).prompt == messages
    raw = json.dumps({"prompt": "[1, 2]", "response": "3"})
    path = table(tmp_path / "b.db", "task", "id integer primary key, raw_task text", [(5, raw)])
    config = TasksetConfig(storage_type="sql", path=str(path), format=PLAIN)
    assert (
        check_taskset(config, f"{KEY}.path") == 1
        and next(Taskset(config, DEFAULTS)).prompt == "[1, 2]"
    )


def test_the_table_is_named_or_the_only_one(tmp_path: Path) -> None:
    path = table(tmp_path / "a.db", "easy", "prompt text, response text", [("a", "b")])
    table(path, "hard", "prompt text, response text", [("c", "d")])
    config = TasksetConfig(storage_type="sql", path=str(path), format=PLAIN)
    with pytest.raises(
        ConfigError, match=r"subset_name=None: .* has the tables easy, hard; name one"
    ):
        check_taskset(config, f"{KEY}.path")
    config.subset_name = "hard"
    assert next(Taskset(config, DEFAULTS)).prompt == "c"
    config.subset_name, config.name = None, "easy"
    assert next(Taskset(config, DEFAULTS)).prompt == "a"
    config.subset_name = "hrad"
    with pytest.raises(ConfigError, match="subset_name=hrad"):
        check_taskset(config, f"{KEY}.path")


def test_bad_tables_are_refused(tmp_path: Path) -> None:
    config = TasksetConfig(storage_type="sql", path=str(tmp_path / "none.db"), format=PLAIN)
    with pytest.raises(ConfigError, match=r"taskset\.path: .*none.db does not exist"):
        check_taskset(config, f"{KEY}.path")
    (tmp_path / "none.db").write_text('{"prompt": "a"}' * 100)
    with pytest.raises(ConfigError, match=r"is no SQLite file .*set storage_type=file"):
        check_taskset(config, f"{KEY}.path")
    config.path = str(table(tmp_path / "empty.db", "t", "prompt text, response text", []))
    with pytest.raises(ConfigError, match="the table is empty"):
        check_taskset(config, f"{KEY}.path")
    config.path = str(table(tmp_path / "wrong.db", "t", "promt text, response text", [("a", "b")]))
    with pytest.raises(
        ConfigError,
        match=r"format.prompt_key: .*table t row 1 has no 'prompt'.*did you mean 'promt'",
    ):
        check_taskset(config, f"{KEY}.path")
    config.path = str(
        table(tmp_path / "null.db", "t", "prompt text, response text", [("a", "b"), (None, "c")])
    )
    with pytest.raises(ConfigError, match="row 2 has null as 'prompt', which must be text"):
        check_taskset(config, f"{KEY}.path")


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "db"])
def test_a_row_may_name_its_own_workflow_and_reward(tmp_path: Path, suffix: str) -> None:
    """F21; a row that names none has those of its set."""
    rows = [
        {"prompt": "a", "response": "1", "way": "math", "judge": None},
        {"prompt": "b", "response": "2", "way": None, "judge": "accuracy"},
    ]
    path = tmp_path / f"tasks.{suffix}"
    if suffix == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    elif suffix == "db":
        table(
            path,
            "t",
            "prompt text, response text, way text, judge text",
            [tuple(row.values()) for row in rows],
        )
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    form = FormatConfig(prompt_type="plaintext", workflow_key="way", reward_fn_key="judge")
    config = TasksetConfig(
        path=str(path), storage_type="sql" if suffix == "db" else "file", format=form, shuffle=False
    )
    assert check_taskset(config, f"{KEY}.path") == 2
    assert (names_in(config, "workflow_key", KEY), names_in(config, "reward_fn_key", KEY)) == (
        {"math"},
        {"accuracy"},
    )
    tasks = list(Taskset(config, DEFAULTS))
    assert [(t.workflow, t.reward) for t in tasks] == [
        ("math", "exact_match"),
        ("single_turn", "accuracy"),
    ]
    form.workflow_key = "wya"
    with pytest.raises(ConfigError, match="format.workflow_key: no row has a 'wya'"):
        names_in(config, "workflow_key", KEY)


def test_a_name_in_a_row_must_be_a_name(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a", "response": "1", "way": 3}')
    form = FormatConfig(prompt_type="plaintext", workflow_key="way")
    with pytest.raises(ConfigError, match=r"format.workflow_key: .*line 1 has 3 as 'way'"):
        names_in(TasksetConfig(path=str(path), format=form), "workflow_key", KEY)


def test_a_row_names_no_code_that_the_config_does_not_allow(tmp_path: Path) -> None:
    """Neither when the config is looked at, nor where a task is made of it."""
    path, evil = tmp_path / "a.jsonl", "timeit:timeit"
    path.write_text(json.dumps({"prompt": "a", "response": "1", "judge": evil, "way": "math"}))
    form = FormatConfig(prompt_type="plaintext", reward_fn_key="judge", workflow_key="way")
    config = TasksetConfig(path=str(path), format=form)
    with pytest.raises(ConfigError, match="line 1 has 'timeit:timeit', .*allowed_functions"):
        names_in(config, "reward_fn_key", KEY)
    with pytest.raises(ConfigError, match="row 1 has 'timeit:timeit', .*allowed_functions"):
        list(Taskset(config, DEFAULTS))
    form.allowed_functions = [evil]
    assert names_in(config, "reward_fn_key", KEY) == {evil}
    assert [task.reward for task in Taskset(config, DEFAULTS)] == [evil]
