"""Utilisation by hand, and which device has which peak."""

import numpy as np
import pytest

from rft.data.packing import Cost
from rft.ground.device import choose, peak_of
from rft.monitor.metrics import Speed

LENGTHS, SECONDS, RANKS = [1000, 3000], 2.0, 4
FORWARD = 1e9 * 4000 + 1e5 * (1000**2 + 3000**2)


def speed(peak: float | None, recomputes: bool = False) -> dict[str, float]:
    return Speed(RANKS, peak, recomputes).metrics(sum(LENGTHS), FORWARD, SECONDS)


def test_three_passes_over_time_ranks_and_peak() -> None:
    found = speed(peak=100.0)
    tflops = 3 * FORWARD / SECONDS / RANKS / 1e12
    assert found == pytest.approx(
        {"perf/tokens_per_s": 2000, "perf/tflops_per_gpu": tflops, "perf/mfu": tflops / 100}
    )


def test_recomputed_activations_are_no_work_of_the_model() -> None:
    found, plain = speed(100.0, recomputes=True), speed(100.0)
    assert found["perf/mfu"] == plain["perf/mfu"] and found["perf/hfu"] == pytest.approx(
        4 / 3 * found["perf/mfu"]
    )


def test_without_a_peak_or_a_step_nothing_is_made_up() -> None:
    assert speed(None).keys() == {"perf/tokens_per_s", "perf/tflops_per_gpu"}
    assert Speed(1, 1.0, False).metrics(0.0, 0.0, 1.0) == {}
    assert choose("cpu").peak_tflops("bf16") is None


def test_peaks_are_found_by_the_names_that_devices_give() -> None:
    names = {
        "NVIDIA H100 80GB HBM3": 989.4,
        "NVIDIA H100 PCIe": 756.0,
        "NVIDIA H100 NVL": 835.0,
        "NVIDIA H200": 989.4,
        "NVIDIA A100-SXM4-80GB": 312.0,
        "NVIDIA B200": 2250.0,
        "NVIDIA H20": 148.0,
        "NVIDIA L4": 121.0,
        "NVIDIA L40S": 362.0,
    }
    assert {name: peak_of(name) for name in names} == names
    assert peak_of("NVIDIA GeForce RTX 4090") is None and peak_of("NVIDIA L40") is None


def test_flops_are_those_of_the_sequences_not_of_their_sum() -> None:
    assert float(Cost(1e9, 1e5)(np.array(LENGTHS)).sum()) == FORWARD
