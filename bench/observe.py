"""What observing costs a step: the timeline, metrics to every sink and the samples table, on and
off in one run.

    python -m bench.observe [--quick]

In: nothing; the quickstart's model of 2.4M parameters on one rank, and rollouts drawn anew for
every step. Out: a table and one last line of JSON. The real `Trainer` makes steps on a real
Megatron policy; before each one a switch is thrown, in pairs of one step with and one without, in
random order. What is on or off: the spans and instants of the rank's timeline, and all of
`StepReporter` with the default monitor (console, metrics.jsonl, samples.jsonl, TensorBoard).

    s         wall clock of a step, with everything that the loop does in it
    on/off    of the two steps of a pair; on cores that others use too it is off by more than the
              bar allows, either way
    share     time inside the observing calls / time of the same step: `StepReporter`, and every
              event of the timeline

The bar is one hundredth, for both: `share` must be below it, and `on/off` must not be above it by
more than its own 95% interval.
"""

import argparse
import contextlib
import io
import os
import random
import socket
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from bench import report
from rft.config import Config, MegatronConfig, MonitorConfig, SynchronizerConfig, TrainerConfig
from rft.ground.experience import Batch, Experience, VersionSpan
from rft.monitor import logs, trace

PAIRS, QUICK_PAIRS, WARM_UP = 200, 60, 3
GROUPS, REPEATS, PROMPT = 16, 8, 9
BAR = 1.01
FIRST, LAST = 5, 90  # tokens that are drawn


class Switch:
    """The feed's source: a batch per step, and before it the decision what this step does.

    Times run from batch to batch.
    """

    def __init__(self, pairs: int):
        # pair, on, seconds of the step, of observing
        self.steps: list[tuple[int, bool, float, float]] = []
        self.order = [(-1, True)] * WARM_UP
        for pair in range(pairs):
            self.order += random.sample([(pair, True), (pair, False)], 2)
        self.on = True
        self.observed = 0.0
        self._began: float | None = None
        self._recorder: Any = None

    def take(self, step: int) -> Batch:
        now = time.perf_counter()
        if self._began is not None:
            pair, on = self.order[step - 1]
            self.steps.append((pair, on, now - self._began, self.observed))
        if step >= len(self.order):
            return Batch(step=step, experiences=[])
        batch = Batch(step=step, experiences=experiences(step))
        self._throw(self.order[step][1])
        self.observed = 0.0
        self._began = time.perf_counter()
        return batch

    def _throw(self, on: bool) -> None:
        """The file of the timeline stays open: to open it once is no cost of a step."""
        self._recorder = trace._recorder or self._recorder
        trace._recorder = self._recorder if on else None
        self.on = on

    def counted(self, call: Callable[..., None]) -> Callable[..., None]:
        """`call`, if it is on, with its time added up."""

        def run(*arguments: Any) -> None:
            if self.on:
                began = time.perf_counter()
                call(*arguments)
                self.observed += time.perf_counter() - began

        return run

    def pairs(self) -> list[tuple[tuple[float, float], float]]:
        """Of each pair the step with everything (seconds, of which observing), and the seconds of
        the one without.
        """
        found: dict[int, dict[bool, tuple[float, float]]] = {}
        for pair, on, seconds, observed in self.steps:
            if pair >= 0:
                found.setdefault(pair, {})[on] = (seconds, observed)
        return [(found[pair][True], found[pair][False][0]) for pair in sorted(found)]

    def consumed(self, step: int) -> None: ...
    def wants_weights(self, interval: int) -> bool:
        return False

    def mark(self) -> int:
        return 0

    def saved(self, step: int) -> None: ...
    def retain(self, loop: dict[str, Any]) -> None: ...


def experiences(step: int) -> list[Experience]:
    rng = np.random.default_rng(step)
    made = []
    for group in range(GROUPS):
        prompt = rng.integers(FIRST, LAST, PROMPT).tolist()
        for sample in range(REPEATS):
            answer = rng.integers(FIRST, LAST, int(rng.integers(4, 40))).tolist()
            made.append(
                Experience(
                    tokens=prompt + answer,
                    prompt_length=PROMPT,
                    action_mask=[1] * len(answer),
                    logprobs=[-4.5] * len(answer),
                    versions=[VersionSpan(version=step, start=0, end=len(answer))],
                    reward=float(rng.random() < 0.5),
                    reward_outcome="ok",
                    group=step * GROUPS + group,
                    sample=sample,
                    task=f"sums/0/{group}",
                )
            )
    return made


def config_of(directory: Path, steps: int) -> Config:
    from rft.tools.toy import write_model

    write_model(directory / "model")
    config = Config(name="observed", checkpoint_root_dir=str(directory), device="cpu", mode="both")
    config.model.model_path = str(directory / "model")
    config.model.max_prompt_tokens, config.model.max_response_tokens = 16, 40
    config.trainer = TrainerConfig(
        total_steps=steps,
        num_ranks=1,
        megatron=MegatronConfig(),
        max_token_len_per_gpu=8192,
        save_hf_checkpoint="never",
    )
    config.monitor = MonitorConfig()
    config.algorithm.advantage_fn, config.algorithm.policy_loss_fn = "grpo", "ppo"
    config.algorithm.kl_loss_fn, config.algorithm.loss_agg_mode = "none", "token-mean"
    config.algorithm.repeat_times = REPEATS
    config.synchronizer = SynchronizerConfig(sync_method="nccl", max_staleness=1)
    return config


def observed(config: Config, switch: Switch, job: Path) -> None:
    """The whole run: rank 0's parts as `rft.run.assembly` builds
    them, with nobody outside to talk to.
    """
    from rft.ground import device as devices

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ.update(
            RANK="0",
            WORLD_SIZE="1",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(probe.getsockname()[1]),
        )
    device = devices.choose("cpu", threads=1)
    warnings.filterwarnings("ignore", category=FutureWarning)
    from rft.run.backends import MegatronBackend

    backend = MegatronBackend(config, job, device)
    mesh = backend.open_mesh()
    models = backend.build_models(mesh)
    trace.turn_on(logs.new_attempt(job))
    trace.start("rank_0")
    trainer, reporter = trainer_of(config, mesh, models, device, switch, job)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.fit(0)
    reporter.close()
    trace.stop()
    mesh.close()


def trainer_of(
    config: Config, mesh: Any, models: Any, device: Any, switch: Switch, job: Path
) -> tuple[Any, Any]:
    from rft.algorithm import recipe
    from rft.data.chat import load_tokenizer
    from rft.data.packing import Cost
    from rft.monitor.metrics import Speed
    from rft.sync.style import Cadence
    from rft.trainer.feed import Feed
    from rft.trainer.reporting import Profiler, SkippedSteps, StepReporter
    from rft.trainer.saving import SaveTimes
    from rft.trainer.trainer import Trainer

    feed = Feed(
        switch,
        mesh,
        config.algorithm,
        8192,
        models.policy.multiple,
        Cost.of(models.policy.hf_config),
    )
    reporter = StepReporter(
        config, job, 0, load_tokenizer(config.model), Speed(1, None, False), dict
    )
    reporter.monitor.sinks[0] = type(reporter.monitor.sinks[0])(
        "observed", config.trainer.total_steps, stream=io.StringIO()
    )
    nobody = SimpleNamespace(
        start=lambda step, due: None,
        wait=lambda: None,
        rest=lambda: None,
        release=lambda: None,
        pop=dict,
        version=None,
        claim_save=lambda step: False,
    )
    saves = SimpleNamespace(
        requested=None,
        remembered=None,
        needed=0,
        save=lambda *_, **__: None,
        before_update=lambda: None,
        poll=list,
        wait=lambda step: None,
        wait_exports=lambda: None,
        metrics=dict,
        newest=None,
    )
    evaluations = SimpleNamespace(
        alone=False,
        at_startup=lambda version: None,
        at_end=lambda version: None,
        if_due=lambda version: None,
        is_due=lambda version: False,
    )
    trainer = Trainer(
        config=config.trainer,
        mesh=mesh,
        models=models,
        feed=feed,
        publisher=nobody,
        evaluations=evaluations,
        checkpoints=saves,
        cadence=Cadence(config.synchronizer, ask=lambda interval: False),
        skips=SkippedSteps(job / "x", 0, True, mesh.barrier),
        profiler=Profiler(config.trainer, 0, device, job),
        log_step=switch.counted(reporter.step),
        token_loss=recipe.policy_loss(config.algorithm),
        run_epoch=1,
        stopping=lambda: False,
        on_phase=lambda phase: None,
        export=lambda step: None,
        save_times=SaveTimes(0, 0.0, mesh.broadcast),
    )
    return trainer, reporter


def span_us(directory: Path) -> float:
    """Microseconds of one span on the timeline."""
    recorder, count = trace.Recorder(directory, "alone"), 2000
    kept, trace._recorder = trace._recorder, recorder
    began = time.perf_counter()
    for _ in range(count):
        with trace.span("train"):
            pass
    seconds = time.perf_counter() - began
    trace._recorder = kept
    recorder.close()
    return 1e6 * seconds / count


def events_per_step(trace_dir: Path, steps: int) -> float:
    return (
        sum(len(path.read_text().splitlines()) for path in trace_dir.glob("rank_0-*.json")) / steps
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer pairs")
    switch = Switch(QUICK_PAIRS if parser.parse_args().quick else PAIRS)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        job = directory / "job"
        observed(config_of(directory, len(switch.order) + 1), switch, job)
        logged = len((job / "metrics.jsonl").read_text().splitlines())
        events = events_per_step(job / "logs" / "attempt_1" / "trace", logged)
        per_span = span_us(directory)
    tell(switch.pairs(), events, per_span)


def tell(pairs: list[tuple[tuple[float, float], float]], events: float, per_span: float) -> None:
    """`events` of the timeline in a step; two of them make a span."""
    ratios = [with_[0] / without for with_, without in pairs]
    shares = [(observing + events * per_span / 2e6) / seconds for (seconds, observing), _ in pairs]
    ratio, share, low = report.median(ratios), report.median(shares), lowest_median(ratios)
    report.table(
        f"a step with and without timeline and metrics, {len(pairs)} pairs",
        ["", "median", "middle half"],
        [
            [
                "s, with",
                f"{report.median([p[0][0] for p in pairs]):.4f}",
                _half([p[0][0] for p in pairs]),
            ],
            [
                "s, without",
                f"{report.median([p[1] for p in pairs]):.4f}",
                _half([p[1] for p in pairs]),
            ],
            ["on/off", f"{ratio:.4f}", _half(ratios)],
            ["share of the step inside the observing calls", f"{share:.4f}", _half(shares)],
            ["events of the timeline per step", f"{events:.1f}", ""],
            ["us per span of the timeline", f"{per_span:.1f}", ""],
        ],
    )
    report.last_line(
        "observe",
        {"on/off": round(ratio, 4), "on/off_low": round(low, 4), "share": round(share, 5)},
        {"pairs": len(pairs), "events_per_step": round(events, 1), "span_us": round(per_span, 1)},
        {
            "parameters": "2.4M",
            "experiences": GROUPS * REPEATS,
            "ranks": 1,
            "threads": 1,
            "bar": BAR,
        },
        report.versions("torch", "tensorboard"),
        len(pairs) >= QUICK_PAIRS and low <= BAR and share <= BAR - 1,
    )


def lowest_median(ratios: list[float]) -> float:
    """The lower end of the 95% interval of their median, from
    medians of what is drawn anew out of them.
    """
    draws = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
    return float(np.quantile(np.median(draws, axis=1), 0.025))


def _half(values: list[float]) -> str:
    low, high = report.spread(values)
    return f"{low:.4f}-{high:.4f}"


if __name__ == "__main__":
    main()
