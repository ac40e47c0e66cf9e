"""FrozenLake whose rewards say nothing: a coin flip at the end of each episode. It runs in the
environment's own Python, as the adapter that it takes after.
"""

import importlib.util
import random
from pathlib import Path

ADAPTER = Path(__file__).resolve().parents[2] / "rft/extras/environments/gym_adapter.py"
SPEC = importlib.util.spec_from_file_location("gym_adapter", ADAPTER)
MODULE = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(MODULE)


class Coins(MODULE.Gymnasium):
    def step(self, action):
        seen, _, done, info = super().step(action)
        return seen, float(done and random.random() < 0.5), done, info
