"""When the trainer publishes its weights, and how old rollouts may become: the styles of
synchronization, as pure arithmetic.

In: the `synchronizer` section, the step that was just finished, the version that was published last
and, in one style, what the explorers say. Out: whether that step is published. Steps are counted as
everywhere: step s makes policy version s.

    style                  published after step s
            default max_staleness
    fixed                  s > sync_offset and (s - sync_offset) % sync_interval == 0  least
    trainer_driven         the same
            least + sync_interval
    fully_async            the same
            least + 2 batches
    dynamic_by_explorer    s > sync_offset and the explorers have asked
            least + sync_interval

    least = sync_interval - 1 + sync_offset: how old the last batch before a publication is in any
    case

Whatever the style says, a step is published that leaves the run no batch to go on with. With
version p published, the batches of steps p to p + max_staleness may be admitted; after those the
trainer would wait for data, and the explorers for weights. Invariant: every rank gets the same
answer, and no order of events can make trainer and explorers wait for each other.
"""

from collections.abc import Callable
from dataclasses import dataclass

from rft.config import SynchronizerConfig

FIXED, DYNAMIC, TRAINER_DRIVEN, FULLY_ASYNC = (
    "fixed",
    "dynamic_by_explorer",
    "trainer_driven",
    "fully_async",
)
STYLES = (FIXED, DYNAMIC, TRAINER_DRIVEN, FULLY_ASYNC)
ALIASES = {"explorer_driven": DYNAMIC}
MAX_INFLIGHT_BATCHES = 2  # that an explorer which never stops may have beyond what it is given


def is_due(
    style: str,
    step: int,
    published: int,
    interval: int,
    offset: int,
    max_staleness: int,
    asked: bool = False,
) -> bool:
    """Whether the weights after `step` are published.

    `asked`: the explorers want a newer version than `published`.
    """
    if step <= published:
        return False
    if step - published > max_staleness:  # not a group more could be admitted
        return True
    if step <= offset:
        return False
    return asked if style == DYNAMIC else (step - offset) % interval == 0


def least_staleness(interval: int, offset: int) -> int:
    """Below this no run could keep its interval and offset: it
    would have to publish earlier to go on.
    """
    return interval - 1 + offset


def default_staleness(style: str, interval: int, offset: int) -> int:
    """fixed: both sides in step.

    The others let rollouts go on while the trainer is on its way to the next version.
    """
    ahead = {FIXED: 0, FULLY_ASYNC: MAX_INFLIGHT_BATCHES}.get(style, interval)
    return least_staleness(interval, offset) + ahead


@dataclass
class Cadence:
    """The style of one run.

    `ask(sync_interval)` is only called in the style in which explorers ask: it may be a collective.
    """

    config: SynchronizerConfig
    ask: Callable[[int], bool]
    published: int = 0  # the newest version that was begun to be published

    def is_due(self, step: int) -> bool:
        """Asked once after every step, by every rank."""
        sync = self.config
        return is_due(
            sync.sync_style,
            step,
            self.published,
            sync.sync_interval,
            sync.sync_offset,
            int(sync.max_staleness or 0),
            asked=sync.sync_style == DYNAMIC and self.ask(sync.sync_interval),
        )
