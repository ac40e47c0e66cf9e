"""What environment a process of a run gets: as little as it needs.

    foreign(...)        of programs that a model or a user wrote, and of rewards: an allow-list, and
                        the variables that the config names
    others_secrets(...) what a rank or an engine has no business with

In: this process's environment, and the names that `pass_on` was given, which reach the processes of
a run as names alone. Out: environments, or names. Invariants: a variable whose name or value says
that it is a secret is in no foreign environment unless the config names it; whatever is passed on
travels from parent to child in the environment, never on a command line and never through Ray's
`runtime_env`, which Ray writes to its logs.
"""

import os
from collections.abc import Iterable, Mapping
from typing import Literal

from rft.ground import redact

Kind = Literal["rewards", "programs"]
# variables with names: of all foreign processes, and of those that compute rewards
NAMED = {"programs": "RFT_PASSED_VARIABLES", "rewards": "RFT_REWARD_VARIABLES"}
TOKEN = "RFT_ENDPOINT_TOKEN"  # a key of the user's own choice; default: another one for every run
ALLOWED = {
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TERM", "HOSTNAME"),
    *("TMPDIR", "TMP", "TEMP", "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV", "PWD"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
    *("http_proxy", "https_proxy", "all_proxy", "no_proxy"),
    *("RFT_PLUGIN_DIRS", "RFT_TRACE_DIR", *NAMED.values()),
}
ALLOWED_BEGINNINGS = (
    *("LC_", "PYTHON", "CONDA_", "XDG_", "OMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "MALLOC_"),
    *("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TOKENIZERS_", "TIKTOKEN_", "NLTK_"),
    *("CUDA_", "NVIDIA_", "TORCH_", "MPL"),
)
# of a config's secrets, those of the explorer and of what it starts
EXPLORERS = ("EXPLORER_", "BUFFER_EXPLORER_INPUT_", "DATA_PROCESSOR_", "SERVICE_")
MONITORS = ("WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")


def pass_on(programs: Iterable[str], rewards: Iterable[str]) -> None:
    """From now on foreign processes, of this process and of those that it starts, get these
    variables, too; `rewards`: only those that compute rewards, like the keys of their judges.
    """
    for kind, names in (("programs", programs), ("rewards", rewards)):
        known = dict.fromkeys([*named(kind), *names])
        if known:
            os.environ[NAMED[kind]] = ",".join(known)


def named(kind: str) -> list[str]:
    return [name for name in os.environ.get(NAMED[kind], "").split(",") if name]


def names_to_tell() -> dict[str, str]:
    """What `pass_on` was told, for processes that do not inherit it: names, no values."""
    return {name: os.environ[name] for name in NAMED.values() if name in os.environ}


def foreign(kind: Kind) -> dict[str, str]:
    """The environment of a process that runs what nobody here has read."""
    wanted = {*named("programs"), *(named("rewards") if kind == "rewards" else ())}
    return {
        name: value
        for name, value in os.environ.items()
        if name in wanted or (_is_allowed(name) and not _is_secret(name, value))
    }


def _is_allowed(name: str) -> bool:
    return name in ALLOWED or name.startswith(ALLOWED_BEGINNINGS)


def _is_secret(name: str, value: str) -> bool:
    """A proxy's address may have a password in it."""
    return redact.VARIABLES.search(name) is not None or redact.text(value) != value


def others_secrets(part: Literal["rank", "engine"]) -> list[str]:
    """Variables of this process's that hold secrets of other parts of the run. What the user's own
    environment has beside them stays.
    """
    found = []
    for name in os.environ:
        section = name.removeprefix(redact.PASSED_ON)
        of_explorer = name == TOKEN or (section != name and section.startswith(EXPLORERS))
        if part == "engine":
            of_explorer = of_explorer or section != name or name in MONITORS
        if of_explorer or (name in named("rewards") and redact.VARIABLES.search(name)):
            found.append(name)
    return found


def without(environment: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """With HIDDEN in their places: the config that a rank reads may mention them."""
    return dict(environment) | dict.fromkeys(set(names) & set(environment), redact.HIDDEN)
