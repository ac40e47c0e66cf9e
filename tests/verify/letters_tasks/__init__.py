"""A taskset in the format of verifiers' hub since 0.3: count a letter of a word."""

import verifiers.v1 as vf

__all__ = ["Letters"]
ROWS = [("banana", "a", 3), ("letter", "t", 2), ("abc", "z", 0)]


class Counted(vf.TaskData):
    answer: str = ""


class Count(vf.Task[Counted]):
    @vf.reward
    async def right(self, trace):
        if self.data.system_prompt == "broken":
            raise KeyError("no such answer")
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.reward(weight=0.25)
    async def short(self, trace):
        return float(len(trace.last_reply) < 3)

    @vf.metric
    async def length(self, trace):
        return float(len(trace.last_reply))


class LettersConfig(vf.TasksetConfig):
    broken: bool = False


class Letters(vf.Taskset[Count, LettersConfig]):
    def load(self):
        system = "broken" if self.config.broken else None
        for word, letter, number in ROWS:
            asked = f"how many {letter} in {word}?"
            yield Count(Counted(prompt=asked, answer=str(number), system_prompt=system))
