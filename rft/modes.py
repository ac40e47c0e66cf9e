"""What a stage without a trainer does: collect rollouts (`explore`), answer clients (`serve`) or score exported checkpoints
(`bench`).

In: the explorer actor. Out: experiences in the durable buffer, or `bench/<set>/<metric>` in metrics.jsonl, with the
checkpoint's step as the step.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rft import config as configs
from rft.config import Config, ConfigError
from rft.experience import EvalResult, decode


def explore(config: Config, explorer: Any, synchronizer: Any) -> None:
    """Run until the taskset, or total_steps' worth of it, is stored in the buffer.

    Engines serve the newest weights that a trainer has saved for this job, from the first request on, and those that it saves
    while this goes on. As long as there are none they serve the model that they were started with.
    """
    import ray

    version = ray.get(synchronizer.follow.remote(configs.checkpoint_root(config)))
    print("engines serve " + ("the model as given" if version is None else f"saved version {version}"), flush=True)
    ray.get(explorer.explore.remote())
    ray.get(explorer.finished.remote())


def serve(config: Config, explorer: Any, synchronizer: Any, say: Callable[[str], None]) -> None:
    """Tell where the engines answer; they do until somebody ends the run, with the newest weights that a trainer has saved.

    As in `explore`, and with one engine as with many: new weights are installed between two steps of what is being answered.
    """
    import ray

    version = ray.get(synchronizer.follow.remote(configs.checkpoint_root(config)))
    url = ray.get(explorer.base_url.remote())
    what = "the model as given" if version is None else f"saved version {version}"
    say(f"serving {what} at {url}; the key is in {configs.job_dir(config) / 'endpoint.json'}")


def evaluate_checkpoints(config: Config, explorer: Any) -> None:
    """Evaluate the base model as step 0 and every Hugging Face export in ascending order (A8), or only the newest."""
    import ray

    from rft.monitor.sinks import build

    job = configs.job_dir(config)
    found = exports(job)
    chosen = found[-1:] if config.explorer.bench_on_latest_checkpoint else [(0, Path(config.model.model_path)), *found]
    monitor = build(config.monitor, job / "bench", config.project, f"{config.name}_bench")
    for step, path in chosen:
        ray.get(explorer.load_weights.remote(str(path), step))
        for reply in ray.get(explorer.evaluate.remote(step)):
            outcome = decode(reply, EvalResult)
            metrics = {f"bench/{outcome.taskset}/{name}": value for name, value in outcome.metrics.items()}
            monitor.log(metrics, step)
            print(json.dumps({"step": step, **metrics}), flush=True)
    monitor.close()


def check_exports(config: Config) -> None:
    """Refuse a bench that has nothing to evaluate."""
    job = configs.job_dir(config)
    if not exports(job):
        raise ConfigError(
            f"mode=bench: no Hugging Face export under {job / 'huggingface'}; train with trainer.save_hf_checkpoint=always first"
        )


def exports(job: Path) -> list[tuple[int, Path]]:
    """(step, directory) of every complete export, oldest first."""
    names = [p for p in (job / "huggingface").glob("step_*") if p.name.removeprefix("step_").isdigit()]
    return sorted((int(p.name.removeprefix("step_")), p) for p in names)
