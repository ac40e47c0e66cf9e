"""reward_std_filter: drop groups whose rewards say too little."""

from statistics import fmean, pstdev

from rft.experience import Experience


class RewardStdFilter:
    """Drop a group whose rewards have a (population) standard deviation of at most `threshold`; a group of one has none."""

    def __init__(self, threshold: float = 0.0) -> None:
        self.threshold = float(threshold)
        if self.threshold < 0:
            raise ValueError("threshold must be 0 or more")

    def process(self, experiences: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
        rewards = [experience.reward for experience in experiences]
        if len(rewards) < 2:
            return [], {"filtered_count": len(rewards)}
        spread = pstdev(rewards)
        kept = experiences if spread > self.threshold else []
        metrics = {"origin_group_advantages/reward_mean": fmean(rewards), "origin_group_advantages/reward_std": spread}
        return kept, {"filtered_count": len(rewards) - len(kept), **metrics}
