"""What a rule of a config is, and how all of them are asked at once.

In: tables of rules and a config. Out: what is refused, each sentence with the key that it is about.
Invariant: a rule that names a refused key is not asked, so one mistake is told once, and no rule
sees a value that cannot be.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from rft.config import TASKSET_KEY, Config, TasksetConfig, get, nearest
from rft.ground.errors import Late, all_of

SETS = f"{TASKSET_KEY} {TASKSET_KEY}s buffer.explorer_input.eval_tasksets"
SECTIONS = [one.name for one in fields(Config)]
Says = str | Callable[[Config], str]


@dataclass(frozen=True)
class Rule:
    """`keys`, of which the first one is refused where `test` says so.

    With `says`: `test` is true where the sentence `says`, which may have {keys} in it, has to be
    said. Without: `test` itself gives the sentences, or raises ConfigError. `derives`: it also sets
    the first key, where that is left out, so others that name it wait for it, but for a config of
    which `applies` says that there is nothing to do. `reads`: what else it looks at; a refusal of
    that says nothing about this rule, but a value that cannot be read does.
    """

    keys: str
    test: Callable[[Config], Any]
    says: Says = ""
    reads: str = ""
    derives: bool = False
    applies: Callable[[Config], bool] = lambda config: True
    late: bool = False

    def problems(self, config: Config) -> Iterator[str]:
        if not (said := self.says):
            yield from self.test(config) or ()
        elif self.test(config):
            yield said(config) if callable(said) else said.format(**vars(config))


def shown(key: str) -> str:
    """`key=value`, as a sentence of a rule begins."""
    return f"{key}={{{key}}}"


def among(key: str, choices: Iterable[str], *others: str) -> Rule:
    """A name that must be one of `choices`."""
    return Rule(
        " ".join((key, *others)),
        lambda c: get(c, key) not in choices,
        lambda c: nearest(str(get(c, key)), choices, key),
    )


@dataclass
class Refusals:
    """What is refused so far, (key, sentence), and the keys that could not be looked at for it;
    `unread`: those whose values were never known.
    """

    unread: list[str] = field(default_factory=list)
    told: list[tuple[str, str]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def ask(self, rules: Iterable[Rule], config: Config) -> None:
        for rule in rules:
            if not rule.applies(config):
                continue
            key, *others = rule.keys.split()
            refused = any(map(self.has, (key, *others)))
            if not refused and not any(_meets(one, self.unread) for one in rule.reads.split()):
                self._hear(key, rule, config)
            elif rule.derives:
                self.skipped.append(key)

    def _hear(self, key: str, rule: Rule, config: Config) -> None:
        said = all_of(rule.problems(config))
        self.told += [(key, Late(one) if rule.late else one) for one in said]

    def has(self, key: str) -> bool:
        """Whether the key, its section or something in it is refused, or waits for such a one."""
        return _meets(key, (*dict(self.told), *self.skipped, *self.unread))

    def sentences(self) -> list[str]:
        """In the order of the schema's sections."""
        return [
            sentence
            for _, sentence in sorted(
                self.told, key=lambda one: SECTIONS.index(one[0].partition(".")[0])
            )
        ]


def _meets(key: str, others: Iterable[str]) -> bool:
    """Whether one of the others is the key, its section or something in it."""
    return any(f"{key}.".startswith(f"{other}.") or other.startswith(f"{key}.") for other in others)


def of_taskset(key: str) -> str:
    """The key by which rules know one of a taskset, whichever set it is of."""
    return re.sub(r"^buffer\.explorer_input\.(eval_)?tasksets\.\d+", TASKSET_KEY, key)


def tasksets(config: Config) -> list[tuple[str, TasksetConfig, bool]]:
    """(config key, taskset, is evaluation) of every taskset."""
    given = config.buffer.explorer_input
    single = [(TASKSET_KEY, given.taskset, False)] if given.taskset else []
    mixed = [(f"{TASKSET_KEY}s.{number}", one, False) for number, one in enumerate(given.tasksets)]
    evaluated = [
        (f"buffer.explorer_input.eval_tasksets.{number}", one, True)
        for number, one in enumerate(given.eval_tasksets)
    ]
    return [*single, *mixed, *evaluated]
