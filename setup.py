"""Package metadata.

Tool configuration is in pyproject.toml; the tested set of versions in requirements/cpu.lock.
"""

from setuptools import find_namespace_packages, setup

CORE = [
    "aiohttp",
    "annotated-types",
    "datasets",
    "hydra-core>=1.3.8,<1.5",
    "math-verify[antlr4-9-3]==0.9.0",
    "matplotlib",
    "megatron-core>=0.16.1",
    "msgspec>=0.20",
    "fsspec",
    "httpx",
    "jinja2",
    "numpy",
    "omegaconf>=2.3.1,<2.5",
    "openai",
    "packaging",
    "psutil",
    "pyarrow",
    "pydantic>=2.11,<3",
    "pydantic-core",
    "pyyaml",
    "ray>=2.60",
    "rich",
    "safetensors",
    "tensorboard",
    "tokenizers",
    "torch==2.13.0",
    "transformers>=5.19,<6",
    "xxhash",
]

setup(
    name="rft",
    version="0.1.0",
    description=(
        "Reinforcement fine-tuning of language models: Megatron trainer, vLLM rollouts, "
        "streamed weights"
    ),
    python_requires=">=3.11,<3.13",
    packages=find_namespace_packages(include=["rft", "rft.*", "hydra_plugins.*"]),
    package_data={"rft.tools": ["*.html", "*.css", "*.js"]},
    install_requires=CORE,
    extras_require={
        "cuda": ["vllm==0.32.0", "transformer-engine[pytorch]>=2.20"],
        "dev": [
            "hypothesis",
            "moto[server]>=5.1",
            "pytest",
            "pytest-asyncio",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
            "s3fs",
        ],
        "s3": ["s3fs"],
        "sql": ["psycopg[binary]>=3.2", "sqlalchemy>=2.0.40,<3"],
        "tinker": ["tinker>=0.38,<1"],
        "monitor": ["wandb>=0.31"],
        "sweep": [
            "hydra-joblib-launcher>=1.2",
            "hydra-submitit-launcher>=1.2",
            "joblib",
            "optuna>=4.9,<6",
            "submitit>=1.5.4",
        ],
    },
    entry_points={
        "console_scripts": ["rft = rft.cli:main"],
        "vllm.general_plugins": ["rft = rft.sync.receiver:register"],
    },
)
