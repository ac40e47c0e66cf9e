"""Stands in for vllm.engine.arg_utils."""

from typing import Any


class AsyncEngineArgs:
    def __init__(self, **given: Any):
        self.given = given
