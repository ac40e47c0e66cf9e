"""When a step goes on without its slowest groups (`explorer.over_rollout`), and which ones those are. No I/O, no clock.

    step's groups ── minimum of them stored ──► wait_s seconds ──► the others are cut: their explorers cancel them, and put what
                                                                   is finished of them or abandon them; the step takes the rest

In: the groups that a step wants. Out: whether enough of them are there, and what each explorer has to cancel. Invariant: a group
leaves the step only by a journal record of its own (failed, or stored), so that a restart finds the same batch.
"""

from math import ceil

from rft.buffer.progress import Group
from rft.config_explorer import OverRolloutConfig


class OverRollout:
    def __init__(self, config: OverRolloutConfig, tasks_per_step: int):
        self.is_on = config.ratio > 0
        self.minimum = ceil(round((1 - config.ratio) * tasks_per_step, 9))  # 0.7 x 10 is 7
        self.wait_s = config.wait_after_min
        self._untold: dict[str, list[Group]] = {}  # by explorer

    def has_enough(self, wanted: list[Group]) -> bool:
        return self.is_on and sum(group.stored for group in wanted) >= self.minimum

    def cut(self, wanted: list[Group]) -> list[Group]:
        """Those that are not there; their explorers are told next."""
        late = [group for group in wanted if not group.stored]
        for group in late:
            self._untold.setdefault(group.explorer, []).append(group)
        return late

    def is_told(self, explorer: str) -> bool:
        return not self._untold.get(explorer)

    def tell(self, explorer: str) -> list[int]:
        """Numbers of the groups that `explorer` has to end, each told once."""
        return [group.number for group in self._untold.pop(explorer, [])]
