"""A trainer that stages step 1 and then waits to be killed: python lone_trainer.py ROOT DEADLINE_S
HAND_DIRECTORY.
"""

import sys
from pathlib import Path

from states import AGENT_SCRIPT, managed, plain, trainer_config

if __name__ == "__main__":
    root, deadline, hand = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    state = plain().fill(1)
    agent = (sys.executable, str(AGENT_SCRIPT), hand)
    with managed(
        root, state, config=trainer_config(agent_deadline_s=deadline), agent=agent
    ) as manager:
        manager.save(1, state, {"seen": 1})
        manager._stager.current.done.wait()
        print("staged", flush=True)
        sys.stdin.read()
