"""dedupe: of responses that are equal, token by token, keep the first."""

from rft.experience import Experience


class DropRepeats:
    """Within a group; with `remember=n` also what is equal, prompt and response, to one of the last n that were kept."""

    def __init__(self, remember: int = 0) -> None:
        self.remember = int(remember)
        if self.remember < 0:
            raise ValueError("remember must be 0 or more")
        self.seen: dict[tuple[int, ...], None] = {}

    def process(self, experiences: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
        found: dict[tuple[int, ...], Experience] = {}
        for experience in experiences:
            tokens = tuple(experience.tokens)
            if tokens not in self.seen:
                found.setdefault(tokens, experience)
        if self.remember:
            self.seen |= dict.fromkeys(found)
            for oldest in list(self.seen)[: max(0, len(self.seen) - self.remember)]:
                del self.seen[oldest]
        return list(found.values()), {"filtered_count": len(experiences) - len(found)}
