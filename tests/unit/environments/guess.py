"""The example of docs/environments.md: guess a number between 0 and 9."""

import random


class Guess:
    def __init__(self, highest=9):
        self.highest = highest

    @classmethod
    def rows(cls, count, seed, **args):
        return [{"prompt": "guess", "response": "", "seed": seed + n} for n in range(count)]

    def reset(self, task):
        self.secret = random.Random(task["seed"]).randint(0, self.highest)
        return f"guess a number from 0 to {self.highest}"

    def step(self, action):
        guess = action.strip()
        if not guess.isdecimal():
            return "that is no number", 0.0, False, {"unread": 1}
        if int(guess) == self.secret:
            return None, 1.0, True, {}
        return "higher" if int(guess) < self.secret else "lower", 0.0, False, {}
