"""The control of the demo and the quickstart: rewards that say nothing about the answers."""

import random

from rft.ground.experience import Experience


class Shuffled:
    """An operator of the experience pipeline: the rewards of a group are dealt anew among its
    samples, every order as likely as any other.

    Mean and spread of a group's rewards stay what they were, and with them the size of the steps;
    which of its answers has which reward is chance.
    """

    def __init__(self, seed: int = 0) -> None:
        self.draw = random.Random(seed)

    def process(self, experiences: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
        dealt = [(one.reward, one.reward_outcome) for one in experiences]
        self.draw.shuffle(dealt)
        for one, (reward, outcome) in zip(experiences, dealt, strict=True):
            one.reward, one.reward_outcome = reward, outcome
        return experiences, {}


def override(stage: str = "") -> str:
    """For a command line of `rft.train`."""
    operators = f'[{{name: "{__file__}:Shuffled"}}]'
    return f"{stage}data_processor.experience_pipeline.operators={operators}"
