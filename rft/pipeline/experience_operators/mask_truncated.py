"""mask_response_truncated: a response that was cut off teaches nothing, and still counts for the baseline of its group.

DAPO's overlong filtering (arXiv:2503.14476, section 3.4).
"""

from rft.experience import Experience


class MaskTruncated:
    def process(self, experiences: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
        cut = [experience for experience in experiences if experience.stop == "length"]
        for experience in cut:
            experience.action_mask = [0] * experience.response_length
        return experiences, {"masked_truncated_count": len(cut)}
