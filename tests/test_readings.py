import torch

from grpo.readings import MemoryReadings, host_peak

MB = 2**20


def occupy(megabytes: int) -> None:
    torch.ones(megabytes * MB, dtype=torch.uint8)


def test_each_phase_has_its_own_peak_and_what_is_inside_of_another_is_not_counted_twice() -> None:
    occupy(1)  # whatever the first tensor of a process costs
    readings = MemoryReadings()
    before = host_peak() / 2**30
    with readings.of("update"):
        occupy(200)
        with readings.of("generate"):
            occupy(600)
        occupy(100)
    highest = readings.highest
    assert highest["memory/generate_gb"] - highest["memory/update_gb"] > 0.3
    assert highest["memory/host_gb"] >= highest["memory/generate_gb"]
    assert highest["memory/update_gb"] >= 0.5 * min(before, highest["memory/update_gb"])


def test_what_is_logged_is_the_highest_since_the_last_time() -> None:
    readings = MemoryReadings()
    with readings.of("generate"):
        occupy(600)
    first, second = readings.since_log(), readings.since_log()
    assert first["memory/generate_gb"] == readings.highest["memory/generate_gb"]
    assert "memory/generate_gb" not in second
    assert second["memory/host_gb"] < first["memory/host_gb"] - 0.3
    assert readings.highest["memory/host_gb"] == first["memory/host_gb"]
