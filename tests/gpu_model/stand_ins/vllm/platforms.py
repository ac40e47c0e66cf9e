"""Stands in for vllm.platforms."""

from types import SimpleNamespace

current_platform = SimpleNamespace(get_device_total_memory=lambda: 81559 * 2**20)
