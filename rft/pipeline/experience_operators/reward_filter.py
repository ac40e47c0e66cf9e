"""reward_filter: keep what was rewarded enough."""

from rft.experience import Experience


class RewardFilter:
    """Keep the experiences whose reward is at least `threshold`."""

    def __init__(self, threshold: float = 0.0) -> None:
        self.threshold = float(threshold)

    def process(self, experiences: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
        kept = [experience for experience in experiences if experience.reward >= self.threshold]
        return kept, {"filtered_count": len(experiences) - len(kept)}
