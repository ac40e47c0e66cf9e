"""No secret leaves the process: what must not be read is taken out of text and records before they
are written.

In: the environment's variables whose names say that they hold a secret, the keys of free
dictionaries whose names do, and what is a secret by its form: a password in an address, a value
behind `api_key=` or `Bearer`, the path of a webhook. Out: the same text with HIDDEN
in their places. Invariants: a value is taken out wherever it stands, whatever the sentence around
it; what is shorter than MIN_LENGTH is not looked for, for it would be found in words.
"""

import functools
import logging
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

log = logging.getLogger(__name__)
HIDDEN = "[hidden]"
AT_ONCE = 2**24  # bytes of a file that is looked through
MIN_LENGTH = 6
# prefix of variables through which a config's secrets reach the processes of the run
PASSED_ON = "RFT_SECRET_"
VARIABLES = re.compile(
    r"(TOKEN|_KEY|APIKEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|_PAT|_PASS|_PWD"
    r"|ACCESS_KEY_ID|_WEBHOOK|WEBHOOK_URL|CONNECTION_STRING|_DSN|DATABASE_URL"
    r"|MLFLOW_TRACKING_USERNAME)$|^" + PASSED_ON,
    re.IGNORECASE,
)
KEYS = re.compile(
    r"(^|_)(api_?key|access_key|access_key_id|account_key|private_key|secret|secret_key|password"
    r"|passwd|passphrase|pwd|pat|token|credentials?|auth|authorization|webhook|webhook_url"
    r"|connection_string|dsn|(openai|anthropic|azure|wandb|hf|huggingface|aws|gcp)_key)$",
    re.IGNORECASE,
)
NAMED = re.compile(r"\$\{oc\.env:(\w+)\}")  # in the place of a secret
# user:password, up to the last @ of the word: a password may have / and @ in it; a port has not
IN_ADDRESS = re.compile(r"(?<=://)[^/\s:@'\"]*:(?!\d+(?:[/?#\s]|$))[^\s'\"]+(?=@)")
VALUE = r"[^\s&;,'\"<>(){}\[\]]{6,}"  # of MIN_LENGTH
BY_FORM = re.compile(
    rf"(?P<name>(?:api_?key|access_?key|account_?key|client_?secret|secret|passwo?r?d|pwd|passphrase"
    rf"|(?<![a-z_])(?:access_|auth_|refresh_)?token|(?<=[?&])(?:key|sig|signature|auth))=)"
    rf"(?!\$\{{){VALUE}"
    rf"|(?P<bearer>\bbearer\s+)(?=\S*[\d._-]){VALUE}"
    rf"|(?P<header>\bauthorization['\"]?\s*[:=]\s*['\"]?(?:basic\s+|token\s+)?)"
    rf"(?!bearer|basic\s|token\s|\[){VALUE}"
    r"|(?P<hook>\b(?:hooks\.slack\.com/|discord(?:app)?\.com/api/webhooks/"
    r"|[\w.]*webhook\.office\.com/))[^\s'\"]+",
    re.IGNORECASE,
)
MAYBE = re.compile(r"=|bearer|authorization|hooks?[./]", re.IGNORECASE)


def is_secret_key(name: str) -> bool:
    """Whether a key of a free dictionary, like `api_key`, holds a secret by its name."""
    return KEYS.search(name) is not None


def values(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The secrets of this environment, the longest first: one may be part of another."""
    secrets = {
        value
        for name, value in environment.items()
        if VARIABLES.search(name) and len(value) >= MIN_LENGTH
    }
    return tuple(sorted(secrets, key=lambda value: (-len(value), value)))


def variable_of(value: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """The variable that has this very secret."""
    names = [
        name for name, known in environment.items() if known == value and VARIABLES.search(name)
    ]
    return min(names) if names and len(value) >= MIN_LENGTH else None


def passed_on(config: Any, escaped: Callable[[str], str], path: str = PASSED_ON.rstrip("_")) -> Any:
    """`config` with a variable's name in the place of every secret; the processes that this one
    starts have that variable.

    `escaped`: all other texts, so that none is read as such a name.
    """
    if isinstance(config, Mapping):
        return {
            key: _passed_on(str(key), value, escaped, f"{path}_{key}")
            for key, value in config.items()
        }
    if isinstance(config, list):
        return [
            _passed_on("", value, escaped, f"{path}_{number}")
            for number, value in enumerate(config)
        ]
    return config


def _passed_on(key: str, value: Any, escaped: Callable[[str], str], path: str) -> Any:
    if not isinstance(value, str):
        return passed_on(value, escaped, path)
    if not value or not (is_secret_key(key) or text(value) != value):
        return escaped(value)
    name = variable_of(value) or re.sub(r"\W", "_", path).upper()
    os.environ[name] = value
    return f"${{oc.env:{name}}}"


def named(found: Any) -> Any:
    """`found` with a variable's name in the place of every text that is a variable's secret: for
    what is read again later.
    """
    if isinstance(found, str):
        name = variable_of(found)
        return found if name is None else f"${{oc.env:{name}}}"
    if isinstance(found, Mapping):
        return {key: named(value) for key, value in found.items()}
    return [named(item) for item in found] if isinstance(found, list) else found


def restored(found: Any) -> Any:
    """What `named` was given, with the variables as they are now; raises KeyError with the name of
    one that is gone.
    """
    if isinstance(found, str):
        variable = NAMED.fullmatch(found)
        return os.environ[variable[1]] if variable else found
    if isinstance(found, Mapping):
        return {key: restored(value) for key, value in found.items()}
    return [restored(item) for item in found] if isinstance(found, list) else found


def inherited() -> dict[str, str]:
    """The variables of `passed_on`, for processes that do not inherit them."""
    return {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}


def text(line: str) -> str:
    """`line` without secrets."""
    return _without(_known(), line)


def _without(secrets: tuple[str, ...], line: str) -> str:
    for value in secrets:
        if value in line:
            line = line.replace(value, HIDDEN)
    if "://" in line:
        line = IN_ADDRESS.sub(HIDDEN, line)
    return BY_FORM.sub(_hidden, line) if MAYBE.search(line) else line


def _hidden(found: re.Match[str]) -> str:
    """What is in front of the secret says what it was, and stays."""
    return next(filter(None, found.groups())) + HIDDEN


def record(found: Any) -> Any:
    """Dictionaries and lists with the same done to every text in
    them, and to whatever has a secret key.
    """
    return _record(_known(), found)


def _record(secrets: tuple[str, ...], found: Any) -> Any:
    if isinstance(found, str):
        return _without(secrets, found)
    if isinstance(found, Mapping):
        return {
            key: _secret(secrets, value) if is_secret_key(str(key)) else _record(secrets, value)
            for key, value in found.items()
        }
    if isinstance(found, list | tuple):
        return [_record(secrets, item) for item in found]
    return found


def _secret(secrets: tuple[str, ...], value: Any) -> Any:
    """Of a key that holds one: every text, of a list, too, and a number that is no count."""
    if isinstance(value, list | tuple):
        return [_secret(secrets, item) for item in value]
    if isinstance(value, str):
        return HIDDEN if value else value
    if isinstance(value, int) and abs(value) >= 10**MIN_LENGTH:
        return HIDDEN
    return _record(secrets, value)


def scrub(directory: Path) -> list[Path]:
    """Overwrite secrets in the files below `directory`, in place: what a library wrote past Python.

    Returns what was touched.
    """
    touched = []
    for path in sorted(directory.rglob("*")):
        try:
            if path.is_symlink() or not path.is_file() or not path.stat().st_size:
                continue
            with path.open("r+b") as file:
                if _overwrite(file):
                    touched.append(path)
        except OSError as error:  # a run has ended, and ends no worse for a disk that has
            log.warning("%s may hold secrets: it cannot be looked through: %s", path, error)
    return touched


def _overwrite(file: BinaryIO) -> int:
    """How often. Read, not mapped: a page that a disk does not give would end the process."""
    secrets = [value.encode() for value in _known()]
    longest, count, start = max(map(len, secrets), default=1), 0, 0
    while len(part := bytearray(file.read(AT_ONCE))) >= (1 if start == 0 else longest):
        for secret in secrets:
            at = part.find(secret)
            while at >= 0:
                file.seek(start + at)
                file.write(b"*" * len(secret))
                part[at : at + len(secret)] = b"*" * len(secret)
                count, at = count + 1, part.find(secret, at + len(secret))
        start += max(len(part) - longest + 1, 1)  # one may lie across two parts
        file.seek(start)
    return count


def _known() -> tuple[str, ...]:
    """Of the environment as it is now; that takes a tenth of a
    millisecond, so it is done once per record.
    """
    return _values_of(
        frozenset((name, os.environ[name]) for name in os.environ if VARIABLES.search(name))
    )


@functools.lru_cache(maxsize=8)
def _values_of(found: frozenset[tuple[str, str]]) -> tuple[str, ...]:
    return values(dict(found))
