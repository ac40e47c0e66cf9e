"""What a wheel holds; everything else about it is in pyproject.toml.

`configs` and `launch` lie inside `rft` in a wheel, and beside it in a checkout: see
`rft.ground.shipped`.
"""

from setuptools import find_namespace_packages, setup

BESIDE = ("configs", "launch")

setup(
    packages=[
        *find_namespace_packages(include=["rft", "rft.*", "hydra_plugins.*"]),
        *(f"rft.{name}" for name in BESIDE),
    ],
    package_dir={f"rft.{name}": name for name in BESIDE},
    package_data={
        "rft.tools": ["*.html", "*.css", "*.js"],
        **{f"rft.{name}": ["**/*.yaml", "**/*.sh", "**/*.py"] for name in BESIDE},
    },
)
