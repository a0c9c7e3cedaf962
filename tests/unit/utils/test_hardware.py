import os
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import psutil
import pynvml
import pytest
import torch

from grpo.utils import hardware, limits
from grpo.utils.errors import ConfigError
from grpo.utils.hardware import (
    check_pytorch_sees_gpu,
    free_gpu_memory,
    host_memory,
    runs_on,
    take_one_gpu,
    use_expandable_segments,
    visible_gpus,
)

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
    monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: "535.104.05")
    monkeypatch.setattr(pynvml, "nvmlSystemGetCudaDriverVersion_v2", lambda: 12020)


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, GPUS[1][1:]),
        ("1", GPUS[1][1:]),
        ("GPU-bbbb", GPUS[1][1:]),
        ("0,1", GPUS[1][1:]),
        ("", None),
        ("-1", None),
    ],
)
def test_the_freest_visible_gpu_counts_for_one_process(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, found: object
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    driver(monkeypatch, GPUS)
    assert free_gpu_memory() == found


def test_several_processes_count_the_gpu_with_least_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    driver(monkeypatch, GPUS)
    assert free_gpu_memory(processes=2) == GPUS[0][1:]


@pytest.fixture
def fresh_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a process in which nobody has chosen a GPU; what it sets is gone afterwards."""
    names = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "RANK", "LOCAL_RANK", "WORLD_SIZE")
    for name in (*names, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # so that it is removed again
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("visible", "taken"),
    [(None, "1"), ("0,1", "1"), ("0", "0"), ("GPU-aaaa,GPU-bbbb", "GPU-bbbb"), ("MIG-a/1/0,MIG-b/2/0", "MIG-a/1/0")],
)
@pytest.mark.usefixtures("fresh_environment")
def test_a_run_without_a_launcher_takes_the_freest_gpu(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, taken: str
) -> None:
    driver(monkeypatch, GPUS)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    line = take_one_gpu()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == taken
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert (line is None) == (visible == "0")
    assert line is None or f"one of 2 GPUs: {taken}" in line
    if taken == "1":
        assert line == (
            "one process takes one of 2 GPUs: 1 (NVIDIA A100-SXM4-80GB, 78.1 GiB free); CUDA_VISIBLE_DEVICES=… "
            "chooses another"
        )


@pytest.mark.usefixtures("fresh_environment")
def test_a_launcher_chooses_the_gpus_of_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, GPUS)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert take_one_gpu() is None
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


@pytest.mark.usefixtures("fresh_environment")
def test_segments_are_expandable_unless_the_user_configured_them(monkeypatch: pytest.MonkeyPatch) -> None:
    use_expandable_segments()
    assert os.environ.pop("PYTORCH_CUDA_ALLOC_CONF") == "expandable_segments:True"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:128")
    use_expandable_segments()
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ


@pytest.fixture
def wsl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kernel's name under WSL2, where `grpo.utils.limits` reads it."""
    kernel = tmp_path / "osrelease"
    kernel.write_text("6.18.33.2-microsoft-standard-WSL2\n")
    monkeypatch.setattr(limits.on_wsl, "__defaults__", (kernel,))


@pytest.mark.usefixtures("fresh_environment", "wsl")
def test_wsl_gets_no_expandable_segments_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    use_expandable_segments()
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    use_expandable_segments()
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"


@pytest.mark.usefixtures("fresh_environment", "wsl")
def test_wsl_gives_two_gib_less_than_it_reports_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, GPUS[:1])
    assert free_gpu_memory() == (*GPUS[0][1:3], (14000 - 2048) * MB)
    driver(monkeypatch, [("GPU-x", "small", 2048 * MB, 1024 * MB)])
    assert free_gpu_memory() == ("small", 2048 * MB, 0)


@pytest.mark.parametrize(
    ("architecture", "runs", "not_on"),
    [
        ("sm_80", [(8, 0), (8, 6), (8, 9)], [(7, 5), (9, 0)]),
        ("sm_86", [(8, 6), (8, 9)], [(8, 0), (12, 0)]),
        ("sm_120", [(12, 0), (12, 1)], [(10, 0), (7, 0)]),
        ("compute_80", [(8, 0), (8, 6), (9, 0), (12, 0)], [(7, 5)]),
        ("sm_90a", [(9, 0)], [(8, 0), (10, 0)]),
        ("compute_90a", [(9, 0)], [(10, 0), (12, 0)]),
        ("sm_100f", [(10, 0), (10, 3)], [(9, 0), (12, 0)]),
        ("compute_100f", [(10, 0), (10, 3)], [(12, 0)]),
    ],
)
def test_kernels_run_on_one_major_version_and_ptx_on_later_ones(
    architecture: str, runs: list[tuple[int, int]], not_on: list[tuple[int, int]]
) -> None:
    assert all(runs_on(architecture, *capability) for capability in runs)
    assert not any(runs_on(architecture, *capability) for capability in not_on)


@pytest.mark.usefixtures("fresh_environment")
def test_a_gpu_without_kernels_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, [("GPU-v", "Tesla V100-SXM2-32GB", 32768 * MB, 32000 * MB)])
    names = {"is_available": lambda: True, "device_count": lambda: 1, "get_device_name": lambda index: "Tesla V100"}
    for name, value in names.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "compute_120"])
    with pytest.raises(ConfigError) as raised:
        check_pytorch_sees_gpu()
    assert str(raised.value).startswith(
        f"Tesla V100 has compute capability 7.0, and PyTorch {torch.__version__} has kernels for sm_75, sm_80, "
        "compute_120 only: install a build of PyTorch for sm_70"
    )
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_70"])
    check_pytorch_sees_gpu()


@pytest.mark.usefixtures("fresh_environment")
def test_a_gpu_of_amd_is_planned_by_its_name_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        pynvml, "nvmlInit", mock.Mock(side_effect=pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND))
    )
    monkeypatch.setattr(hardware, "build_of_pytorch", lambda: {"hip": "7.1"})
    monkeypatch.setattr(torch.version, "hip", "7.1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (60 * MB, 64 * MB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "AMD Instinct MI210")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["gfx90a"])
    assert take_one_gpu() is None
    assert free_gpu_memory() == ("AMD Instinct MI210", 64 * MB, 60 * MB)
    check_pytorch_sees_gpu()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(ConfigError, match="4 GPUs of AMD: HIP_VISIBLE_DEVICES=0 chooses one"):
        check_pytorch_sees_gpu()


def test_a_gpu_of_intel_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "build_of_pytorch", lambda: {"xpu": "20260100"})
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda: "Intel Arc B580")
    with pytest.raises(ConfigError, match=r"would train on Intel Arc B580, .* train.use_cpu=true trains on the CPU"):
        take_one_gpu()
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    take_one_gpu()


@pytest.mark.parametrize(
    ("built_for", "problem"),
    [
        (None, "is built without CUDA and cannot use it: `rm -rf .venv` and `make install`"),
        (
            "13.0",
            "is built for CUDA 13.0 and cannot use it: update the driver, or install a build of PyTorch",
        ),
    ],
)
@pytest.mark.usefixtures("fresh_environment")
def test_a_gpu_pytorch_cannot_use_is_one_line_with_both_versions(
    monkeypatch: pytest.MonkeyPatch, built_for: str | None, problem: str
) -> None:
    driver(monkeypatch, GPUS)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    with pytest.raises(ConfigError) as raised:
        check_pytorch_sees_gpu()
    assert str(raised.value).startswith(
        f"the driver 535.104.05 (CUDA 12.2) has a GPU, {GPUS[0][1]}, and PyTorch {torch.__version__} {problem}"
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the user wants none
    check_pytorch_sees_gpu()


def test_a_machine_without_a_working_driver_has_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_host_memory_is_that_of_the_tightest_control_group(tmp_path: Path) -> None:
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
