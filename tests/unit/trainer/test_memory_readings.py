import torch

from grpo.trainer.memory_readings import MemoryReadings

MB = 2**20


def occupy(megabytes: int) -> None:
    torch.ones(megabytes * MB, dtype=torch.uint8)


def test_each_phase_has_its_own_peak_and_what_is_inside_of_another_is_not_counted_twice() -> None:
    readings = MemoryReadings()
    with readings.of("idle"):
        occupy(1)
    with readings.of("update"):
        occupy(300)
        with readings.of("generate"):
            occupy(700)
        occupy(100)
    highest = {name: value - readings.highest["memory/idle_gb"] for name, value in readings.highest.items()}
    assert 0.25 < highest["memory/update_gb"] < 0.4
    assert 0.6 < highest["memory/generate_gb"] < 0.8
    assert highest["memory/host_gb"] == highest["memory/generate_gb"]


def test_what_is_logged_is_the_highest_since_the_last_time() -> None:
    readings = MemoryReadings()
    with readings.of("generate"):
        occupy(600)
    first, second = readings.since_log(), readings.since_log()
    assert first["memory/generate_gb"] == readings.highest["memory/generate_gb"]
    assert "memory/generate_gb" not in second
    assert second["memory/host_gb"] < first["memory/host_gb"] - 0.3
    assert readings.highest["memory/host_gb"] == first["memory/host_gb"]
