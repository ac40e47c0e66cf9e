"""Stands in for a trainer rank where there is no GPU: says what it was given, and ends well when
all engines have started.

In: the environment that torch's launcher gave it, the resolved config. Out: one line of JSON in the
file of STARTS.
"""

import json
import os
import sys

from omegaconf import OmegaConf

config = OmegaConf.load(sys.argv[-1])
told = {
    "part": f"rank_{os.environ['RANK']}",
    "cards": os.environ.get("CUDA_VISIBLE_DEVICES"),
    "local": os.environ["LOCAL_RANK"],
    "device": config.device,
    "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
}
with open(os.environ["STARTS"], "a", encoding="utf-8") as file:
    file.write(json.dumps(told) + "\n")
if os.environ["RANK"] == "0":
    left = config.explorer.rollout_model.engine_num
    while left:
        with open(os.environ["STARTED"], encoding="ascii") as engines:
            left -= len(engines.read())
