"""rft: reinforcement fine-tuning of language models with a Megatron trainer and vLLM engines.

Importing this package loads neither torch nor megatron nor vllm; `docs/architecture.md` says where
to start reading.
"""

__version__ = "0.1.0"
