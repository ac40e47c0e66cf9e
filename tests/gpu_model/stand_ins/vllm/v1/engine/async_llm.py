"""Stands in for vllm.v1.engine.async_llm."""

import json
import os
from types import SimpleNamespace
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs


class AsyncLLM:
    def __init__(self, arguments: AsyncEngineArgs):
        self.model_config = SimpleNamespace(
            max_model_len=arguments.given["max_model_len"], dtype=arguments.given["dtype"]
        )
        managed = SimpleNamespace(engine_manager=SimpleNamespace(processes=[]))
        self.engine_core = SimpleNamespace(resources=managed)
        self.output_processor = SimpleNamespace(get_num_unfinished_requests=lambda: 0)
        told = {
            "part": os.path.basename(os.environ["RFT_LOG_FILE"]).removesuffix(".log"),
            "cards": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
            "arguments": {name: str(value) for name, value in arguments.given.items()},
        }
        with open(os.environ["STARTS"], "a", encoding="utf-8") as file:
            file.write(json.dumps(told) + "\n")
        with open(os.environ["STARTED"], "w", encoding="ascii") as waiting:
            waiting.write("x")  # a rank waits for one of each engine

    @classmethod
    def from_engine_args(cls, arguments: AsyncEngineArgs) -> "AsyncLLM":
        return cls(arguments)

    async def update_weight_version(self, version: str) -> None: ...

    async def collective_rpc(self, name: str, args: tuple[Any, ...] = ()) -> list[None]:
        return [None]

    def shutdown(self, timeout: float) -> None: ...
