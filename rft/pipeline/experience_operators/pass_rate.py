"""pass_rate_calculator: how often the policy solves a task."""

from statistics import fmean

from rft.experience import Experience

SIXTEENTH = 1 / 16 + 1e-3


class PassRate:
    """Write the mean reward of the group into `info.pass_rate` of its experiences, where operators after it find it.

    Its metrics are means over groups: `selection/valid_ratio` is the share of tasks that are solved sometimes and not always.
    """

    def process(self, experiences: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
        if not experiences:
            return experiences, {}
        rate = fmean(experience.reward for experience in experiences)
        for experience in experiences:
            experience.info["pass_rate"] = rate
        return experiences, {
            "selection/pass_rate": rate,
            "selection/valid_ratio": float(0 < rate < 1),
            "selection/strict_valid_ratio": float(SIXTEENTH < rate < 1 - SIXTEENTH),
            "selection/less_than_one_ratio": float(rate < 1),
            "selection/larger_than_zero_ratio": float(rate > 0),
        }
