from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import psutil
import pynvml
import pytest

from grpo.hardware import free_gpu_memory, host_memory, visible_gpus

MB = 2**20
GPUS = [
    ("GPU-aaaa1111-x", "NVIDIA GeForce RTX 3080 Laptop GPU", 16384 * MB, 14000 * MB),
    ("GPU-bbbb2222-x", "NVIDIA A100-SXM4-80GB", 81920 * MB, 80000 * MB),
]


def driver(monkeypatch: pytest.MonkeyPatch, gpus: list[tuple[str, str, object, int]]) -> None:
    """Put GPUs where NVIDIA's driver would be; an exception in place of a memory is raised."""

    def memory(index: int) -> SimpleNamespace:
        _, _, total, free = gpus[index]
        if isinstance(total, Exception):
            raise total
        return SimpleNamespace(total=total, free=free)

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: len(gpus))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", lambda index: gpus[index][0])
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda index: gpus[index][1])
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", memory)


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, GPUS[0][1:]),
        ("1", GPUS[1][1:]),
        ("GPU-bbbb", GPUS[1][1:]),
        ("0,1", GPUS[0][1:]),
        ("", None),
        ("-1", None),
    ],
)
def test_the_visible_gpu_with_least_free_memory_counts(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, found: object
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    driver(monkeypatch, GPUS)
    assert free_gpu_memory() == found


def test_a_machine_without_a_driver_or_with_a_broken_one_has_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for error in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED):
        monkeypatch.setattr(pynvml, "nvmlInit", mock.Mock(side_effect=pynvml.NVMLError(error)))
        assert (visible_gpus(), free_gpu_memory()) == ([], None)


def test_a_gpu_whose_memory_cannot_be_read_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for error in (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_NO_PERMISSION):
        driver(monkeypatch, [("GPU-x", "some GPU", pynvml.NVMLError(error), 0)])
        assert (visible_gpus(), free_gpu_memory()) == (["0"], None)


def write(path: Path, **files: object) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (path / name.replace("__", ".")).write_text(f"{content}\n")


def test_host_memory_is_that_of_the_tightest_control_group_without_its_cached_files(tmp_path: Path) -> None:
    write(tmp_path / "proc/self", cgroup="0::/outer/inner")
    top = tmp_path / "sys/fs/cgroup"
    stat = "anon 5\ninactive_file 1000000000"
    write(top / "outer", memory__current=3_000_000_000, memory__max=4_000_000_000, memory__stat=stat)
    write(top / "outer/inner", memory__current=2_500_000_000, memory__max="max", memory__stat=stat)
    assert host_memory(tmp_path) == (2_000_000_000, 4_000_000_000)


def test_the_older_kind_of_control_group_is_read_too(tmp_path: Path) -> None:
    write(tmp_path / "proc/self", cgroup="4:cpu,cpuacct:/job\n7:memory:/job")
    write(
        tmp_path / "sys/fs/cgroup/memory/job",
        memory__usage_in_bytes=900_000_000,
        memory__limit_in_bytes=1_000_000_000,
        memory__stat="total_inactive_file 100000000",
    )
    assert host_memory(tmp_path) == (800_000_000, 1_000_000_000)


def test_without_a_limit_host_memory_is_the_machines(tmp_path: Path) -> None:
    write(tmp_path / "proc/self", cgroup="7:memory:/")
    huge = {"memory__usage_in_bytes": 5, "memory__limit_in_bytes": 2**63 - 4096}
    write(tmp_path / "sys/fs/cgroup/memory", **huge, memory__stat="total_inactive_file 0")
    used, limit = host_memory(tmp_path)
    assert limit == psutil.virtual_memory().total
    assert 0 < used < limit
