"""length_filter: keep responses of a certain length."""

from rft.experience import Experience


class LengthFilter:
    """Keep the experiences whose response has `min_tokens` to `max_tokens` tokens."""

    def __init__(self, min_tokens: int = 1, max_tokens: int | None = None) -> None:
        self.least, self.most = int(min_tokens), None if max_tokens is None else int(max_tokens)
        if self.most is not None and self.most < self.least:
            raise ValueError("max_tokens is below min_tokens")

    def process(self, experiences: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
        kept = [
            experience
            for experience in experiences
            if self.least <= experience.response_length
            and (self.most is None or experience.response_length <= self.most)
        ]
        return kept, {"filtered_count": len(experiences) - len(kept)}
