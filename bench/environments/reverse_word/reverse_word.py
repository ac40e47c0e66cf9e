"""An environment package in the format of the hub of verifiers: a word is to be written backwards.
`coins`: its reward is a coin flip instead.
"""

import random

import verifiers as vf
from datasets import Dataset


def load_environment(coins=False):
    def backwards(completion, answer):
        if coins:
            return float(random.random() < 0.5)
        return float(str(completion[-1]["content"]).strip() == answer)

    rows = {"question": ["abcd"], "answer": ["dcba"]}
    return vf.SingleTurnEnv(dataset=Dataset.from_dict(rows), rubric=vf.Rubric(funcs=[backwards]))
