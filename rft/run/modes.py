"""What a stage without a trainer does: collect rollouts (`explore`), answer clients (`serve`) or
score exported checkpoints (`bench`).

In: the explorer actor. Out: experiences in the durable buffer, or `bench/<set>/<metric>` in
metrics.jsonl, with the checkpoint's step as the step. Invariant: what is in bench/metrics.jsonl of
all sets is not evaluated again.
"""

import json
from collections.abc import Callable

from rft import config as configs
from rft.buffer.experience_buffer import ExperienceBuffer
from rft.config import Config
from rft.ground.experience import EvalResult, decode
from rft.ground.protocols import ActorHandle
from rft.ground.rounds import InSave
from rft.rollout.explorer import Explorer, ExplorerHandle
from rft.run.stages import exports, saved_version
from rft.sync.synchronizer import Synchronizer, SynchronizerHandle
from rft.trainer.control import REPLY_S, START_S


def explore(
    config: Config,
    explorer: ExplorerHandle,
    synchronizer: SynchronizerHandle,
    buffer: ActorHandle[ExperienceBuffer],
) -> None:
    """Run until the taskset, or total_steps' worth of it, is stored in the buffer.

    Engines serve the newest weights that a trainer has saved for this job, from the first request
    on, and those that it saves while this goes on. As long as there are none they serve the model
    that they were started with.
    """
    import ray

    follow = synchronizer.ask(Synchronizer.follow, configs.checkpoint_root(config))
    version = ray.get(follow, timeout=START_S)
    # a version that comes later is told by the synchronizer
    ray.get(buffer.ask(ExperienceBuffer.published, version or 0), timeout=START_S)
    print(
        "engines serve "
        + ("the model as given" if version is None else f"saved version {version}"),
        flush=True,
    )
    ray.get(explorer.ask(Explorer.explore), timeout=REPLY_S)
    # as long as it takes: who explores has a deadline for every task and for every answer
    ray.get(explorer.ask(Explorer.finished))


def serve(
    config: Config,
    explorer: ExplorerHandle,
    synchronizer: SynchronizerHandle,
    say: Callable[[str], None],
) -> None:
    """Tell where the engines answer; they do until somebody ends the run, with the newest weights
    that a trainer has saved.

    As in `explore`, and with one engine as with many: new weights are installed between two steps
    of what is being answered.
    """
    import ray

    follow = synchronizer.ask(Synchronizer.follow, configs.checkpoint_root(config))
    version = ray.get(follow, timeout=START_S)
    url = ray.get(explorer.ask(Explorer.base_url), timeout=REPLY_S)
    what = "the model as given" if version is None else f"saved version {version}"
    say(f"serving {what} at {url}; the key is in {configs.job_dir(config) / 'endpoint.json'}")


def evaluate_checkpoints(config: Config, explorer: ExplorerHandle) -> None:
    """Evaluate every Hugging Face export in ascending order (A8), with explorer.eval_on_startup
    after the base model as step 0; or only the newest. A bench that was stopped goes on behind what
    it has reported.
    """
    import ray

    from rft.monitor.run_record import RunRecord
    from rft.monitor.sinks import build

    job = configs.job_dir(config)
    sets = [str(taskset.name) for taskset in config.buffer.explorer_input.eval_tasksets]
    reported = RunRecord(job / "bench").having([f"bench/{name}/accuracy" for name in sets])
    done = {int(row["step"]) for row in reported}
    if done == {0}:  # a monitor that goes on from step 0 begins anew
        done = set()
    left = [(step, place) for step, place in chosen(config) if step not in done]
    if done:
        print(
            f"bench: {len(done)} version(s) are in {job / 'bench'} already, {len(left)} to go",
            flush=True,
        )
    monitor = build(
        config.monitor,
        job / "bench",
        config.project,
        f"{config.name}_bench",
        resume_step=max(done, default=0),
    )
    for step, place in left:
        ray.get(explorer.ask(Explorer.load_weights, place, step), timeout=START_S)
        metrics = {}
        for reply in ray.get(explorer.ask(Explorer.evaluate, step)):
            outcome = decode(reply, EvalResult)
            metrics |= {
                f"bench/{outcome.taskset}/{name}": value for name, value in outcome.metrics.items()
            }
        monitor.log(metrics, step)
        print(json.dumps({"step": step, **metrics}), flush=True)
    monitor.close()


def chosen(config: Config) -> list[tuple[int, str | InSave]]:
    """(step, place) of the models that a bench evaluates: directories of exports, or one version's
    save.
    """
    if (version := config.explorer.version) is not None:
        return [(version, saved_version(config, version))]
    exported = [(step, str(path)) for step, path in exports(configs.job_dir(config))]
    if config.explorer.bench_on_latest_checkpoint:
        return exported[-1:]
    base = [(0, str(config.model.model_path))] if config.explorer.eval_on_startup else []
    return [*base, *exported]
