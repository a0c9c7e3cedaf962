from pathlib import Path

import torch

from grpo.trainer import Update
from grpo.trainer.measurements import MemoryReadings
from tests.cuda_driver import GB, CudaDriver
from tests.stock_trl import ours, train

MB = 2**20


def occupy(megabytes: int) -> None:
    torch.ones(megabytes * MB, dtype=torch.uint8)


def test_nested_phases_have_peaks_of_their_own() -> None:
    readings = MemoryReadings(on_gpu=False)
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
    readings = MemoryReadings(on_gpu=False)
    with readings.of("generate"):
        occupy(600)
    first, second = readings.since_log(), readings.since_log()
    assert first["memory/generate_gb"] == readings.highest["memory/generate_gb"]
    assert "memory/generate_gb" not in second
    assert second["memory/host_gb"] < first["memory/host_gb"] - 0.3
    assert readings.highest["memory/host_gb"] == first["memory/host_gb"]


def test_a_gpu_that_the_run_does_not_use_is_not_read(cuda_driver: CudaDriver) -> None:
    cuda_driver.allocate(3 * GB)
    unused, used = MemoryReadings(on_gpu=False), MemoryReadings(on_gpu=True)
    assert "memory/peak_allocated_gb" not in unused.since_log()
    assert used.since_log()["memory/peak_allocated_gb"] == 3.0


def test_the_peak_of_a_pass_that_ran_out_of_memory_is_kept(tmp_path: Path, cuda_driver: CudaDriver) -> None:
    memory = MemoryReadings(on_gpu=True)
    trainer = ours(tmp_path, Update("auto"), use_cpu=True, max_steps=1, memory=memory)
    trainer.budget.measured = True  # as on a GPU
    trainer.budget.begin(100)
    sizes = iter([15, 2])

    def forward(*args: object) -> None:
        size = next(sizes, 1) * GB
        cuda_driver.allocate(size)
        cuda_driver.allocate(-size)
        if size == 15 * GB:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    assert trainer.packing.shared_prompts.applies({})  # the trial is over before memory runs out
    trainer.model.model.layers[0].register_forward_pre_hook(forward)
    record = train(trainer)
    assert record.logs[0]["update/oom_retries"] == 1
    assert record.logs[0]["memory/update_gb"] == 15.0
