"""dapo_dynamic_sampling: groups that teach nothing are dropped, and others are sampled in their place.

DAPO (Yu et al. 2025, arXiv:2503.14476, section 3.2) keeps a group of G responses only if 0 < number of right ones < G: all others
have advantages of 0. The buffer admits another task for every group that is dropped, so a step still gets all of its groups.
"""

from rft.experience import Experience


class DynamicSampling:
    """Keep a group only if its outcomes differ. The outcome of a response is `metrics[metric_key]`, else its reward: shaping that
    came before does not count where a reward function tells its accuracy. With `correct_threshold`, an outcome above it is right
    and any other wrong; without, outcomes are compared as they are.
    """

    def __init__(self, metric_key: str = "accuracy", correct_threshold: float | None = None) -> None:
        self.metric_key = metric_key
        self.threshold = None if correct_threshold is None else float(correct_threshold)

    def process(self, experiences: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
        outcomes = [experience.metrics.get(self.metric_key, experience.reward) for experience in experiences]
        border = 0.0 if self.threshold is None else self.threshold
        differ = len(set(outcomes)) if self.threshold is None else len({outcome > border for outcome in outcomes})
        count = len(experiences)
        if differ > 1:
            return experiences, {"filtered_count": 0, "dropped_all_correct_count": 0, "dropped_all_wrong_count": 0}
        right = count > 0 and outcomes[0] > border
        return [], {
            "filtered_count": count,
            "dropped_all_correct_count": count if right else 0,
            "dropped_all_wrong_count": 0 if right else count,
        }
