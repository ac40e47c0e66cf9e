"""Stands in for vllm.config."""

from dataclasses import dataclass


@dataclass
class WeightTransferConfig:
    backend: str
