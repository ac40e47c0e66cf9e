"""invalid_reward_filter: leave out what has no reward, because judging it failed or gave no number."""

from rft.experience import Experience
from rft.pipeline.experience_operators.reward_shaping import has_reward


class InvalidRewardFilter:
    def process(self, experiences: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
        kept = [experience for experience in experiences if has_reward(experience)]
        return kept, {"filtered_count": len(experiences) - len(kept)}
