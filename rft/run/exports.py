"""Where a run leaves its Hugging Face exports, and which of them there are.

In: a job's directory. Out: paths; a directory has its name when the export in it is complete.
"""

from pathlib import Path

from rft.config import Config, ConfigError, job_dir


def export_dir(job: Path, step: int) -> Path:
    return job / "huggingface" / f"step_{step:08d}"


def check_exports(config: Config) -> None:
    """Refuse a bench that has nothing to evaluate."""
    job = job_dir(config)
    if not exports(job):
        raise ConfigError(
            f"mode=bench: no Hugging Face export under {job / 'huggingface'}; train with "
            "trainer.save_hf_checkpoint=always first"
        )


def exports(job: Path) -> list[tuple[int, Path]]:
    """(step, directory) of every complete export, oldest first."""
    names = [
        p for p in (job / "huggingface").glob("step_*") if p.name.removeprefix("step_").isdigit()
    ]
    return sorted((int(p.name.removeprefix("step_")), p) for p in names)
