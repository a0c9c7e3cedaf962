"""The table of GPUs, the profiles that refer to it, and the profile that the GPU of this machine resembles."""

import functools
import re
from collections.abc import Callable
from types import SimpleNamespace
from urllib.parse import urlsplit

import psutil
import pynvml
import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from grpo.config import gpus
from grpo.config.check import check
from grpo.config.gpus import PROFILES, automatic, model_for, resembled, table
from grpo.planning.fit import make_plan
from grpo.utils import hardware, local_gpu
from grpo.utils.errors import ConfigError
from grpo.utils.limits import GB
from grpo.utils.local_gpu import LocalGpu
from tests.gpu_profiles import NAMES

Compose = Callable[..., DictConfig]
MAKERS = {"nvidia": ("nvidia.com", "awsstatic.com"), "amd": ("amd.com",), "apple": ("apple.com",)}


def gpu_of(vendor: str, name: str, gib: float, compute: str, shared: bool = False, is_slice: bool = False) -> LocalGpu:
    """The only GPU of a machine."""
    bf16 = vendor != "nvidia" or float(compute) >= 8
    return LocalGpu(name, gib * GB, vendor, compute, bf16, shared or vendor == "apple", is_slice, 1, False)


nvidia = functools.partial(gpu_of, "nvidia")


@pytest.mark.parametrize("profile", NAMES)
def test_a_profile_has_the_numbers_of_the_table(composed: Compose, profile: str) -> None:
    config, file = composed(f"+gpu={profile}"), PROFILES / f"{profile}.yaml"
    if file.exists():
        assert profile == "any" or set(OmegaConf.load(file).gpu) == {"profile"}, "its numbers stand in the table alone"
    gpu, row = config.gpu, table()[config.gpu.profile]
    if profile in table():
        assert gpu.profile == profile
        assert config.model.model_name_or_path == composed(f"model={row['model']}").model.model_name_or_path
    for column in ("name", "architecture", "memory_gb", "bandwidth_gb_s", "tflops", "bf16", "formats", "shared"):
        assert gpu[column] == row[column], column


def test_every_row_has_its_makers_page() -> None:
    for name, row in table().items():
        if name != "any":
            url = urlsplit(row["source"])
            assert url.scheme == "https"
            assert url.hostname.endswith(MAKERS[row["vendor"]]), name
            assert row["memory_gb"] > 0
            assert (row["tflops"], row["bandwidth_gb_s"]) > (0, 0) if name != "apple" else row["tflops"] is None, name
        assert row["bf16"] == (not row["compute"] or row["compute"].startswith("gfx") or float(row["compute"]) >= 8), (
            name
        )


def test_numbers_that_follow_from_the_makers_do() -> None:
    rows, whole = table(), table()["a100_80gb"]
    for number, multiprocessors, eighths in ((1, 14, 1), (2, 28, 2), (3, 42, 4)):
        part = rows[f"a100_{number}g_{10 * eighths}gb"]
        assert part["tflops"] == pytest.approx(whole["tflops"] * multiprocessors / 108, rel=0.002)
        assert part["bandwidth_gb_s"] == pytest.approx(whole["bandwidth_gb_s"] * eighths / 8, rel=0.002)
        assert part["memory_gb"] == whole["memory_gb"] * eighths / 8 - 0.5
    for name, row in rows.items():
        if found := re.match(r"(\d+) cores at ([\d.]+) GHz, 4 operations each", row.get("note", "")):
            assert row["tflops"] == pytest.approx(4 * int(found[1]) * float(found[2]) / 1000, rel=0.005), name
    assert rows["gb10"]["tflops"] == 1000 / 8


@pytest.mark.parametrize(
    ("gpu", "profile", "same", "model"),
    [
        (nvidia("NVIDIA L4", 22.5, "8.9"), "l4", True, "qwen3_4b"),
        (nvidia("NVIDIA H100 80GB HBM3", 79.6, "9.0"), "h100", True, "qwen3_14b"),
        (nvidia("NVIDIA H100 PCIe", 79.6, "9.0"), "h100", False, "qwen3_14b"),
        (nvidia("NVIDIA A100-SXM4-80GB", 80, "8.0"), "a100_80gb", True, "qwen3_14b"),
        (nvidia("NVIDIA A100-SXM4-40GB", 40, "8.0"), "a100_40gb", True, "qwen3_8b"),
        (nvidia("NVIDIA GeForce RTX 3080", 10, "8.6"), "rtx3080", False, "qwen3_1_7b"),
        (nvidia("NVIDIA GeForce RTX 4060 Ti", 8, "8.9"), "rtx4060ti", False, "qwen3_0_6b"),
        (nvidia("NVIDIA GeForce RTX 4080 SUPER", 16, "8.9"), "rtx4060ti", False, "qwen3_4b"),
        (
            nvidia("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 95.6, "12.0"),
            "rtx_pro_6000",
            True,
            "qwen3_14b",
        ),
        (nvidia("Quadro RTX 6000", 24, "7.5"), "t4", False, "qwen3_4b"),
        (nvidia("NVIDIA GB10", 119.7, "12.1", shared=True), "gb10", True, "qwen3_32b"),
        (nvidia("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 9.5, "8.0", is_slice=True), "a100_1g_10gb", True, "qwen3_1_7b"),
        (gpu_of("amd", "AMD Instinct MI300X", 192, "gfx942"), "mi300x", True, "qwen3_32b"),
        (gpu_of("amd", "AMD Radeon PRO W7900", 48, "gfx1100"), "rx7900xtx", False, "qwen3_8b"),
        (gpu_of("apple", "Apple M3 Max", 64, ""), "apple", False, "qwen3_8b"),
        (gpu_of("apple", "Apple M1", 8, ""), "apple", False, "qwen3_0_6b"),
    ],
    ids=lambda value: value.name if isinstance(value, LocalGpu) else "",
)
def test_a_gpu_resembles_the_profile_that_is_nearest(gpu: LocalGpu, profile: str, same: bool, model: str) -> None:
    assert (resembled(gpu), model_for(gpu)) == (profile, model)
    row = automatic(gpu)
    assert f"{' is' if same else ' resembles'} +gpu={profile}" in row["found"]
    assert row["memory_gb"] == round(gpu.memory / GB, 2)
    assert (row["tflops"] is not None) == same, "the speed of another GPU is not its own"
    assert ("a slice of a GPU, planned by its own memory" in row["found"]) == gpu.is_slice


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, float, tuple[int, int], int], None]:
    """Put GPUs of one kind where NVIDIA's driver would be: their name, GiB, compute capability and number."""

    def install(name: str, gib: float, compute: tuple[int, int], count: int = 1) -> None:
        size = SimpleNamespace(total=gib * GB, free=gib * GB - GB)
        answers = {
            "nvmlInit": lambda: None,
            "nvmlDeviceGetCount": lambda: count,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetUUID": lambda index: f"GPU-{index}",
            "nvmlDeviceGetName": lambda index: name,
            "nvmlDeviceGetMemoryInfo": lambda index: size,
            "nvmlDeviceGetCudaComputeCapability": lambda index: compute,
            "nvmlDeviceGetMigMode": lambda index: (0, 0),
        }
        for key, answer in answers.items():
            monkeypatch.setattr(pynvml, key, answer)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus.gpu_here.cache_clear()
    yield install
    gpus.gpu_here.cache_clear()


def compose_now(*overrides: str) -> DictConfig:
    """Compose with Hydra itself, which caches nothing."""
    from hydra import compose

    OverridesParser.create().parse_overrides(list(overrides))
    return compose("config", list(overrides))


def test_auto_takes_the_gpu_that_is_here(composed: Compose, one_gpu: Callable[..., None]) -> None:
    one_gpu("NVIDIA GeForce RTX 3060", 12, (8, 6))
    config = compose_now("+gpu=auto")
    plan = make_plan(config)
    assert config.model.model_name_or_path == "Qwen/Qwen3-1.7B"
    assert plan.found == "NVIDIA GeForce RTX 3060 (8.6) with 12.0 GiB is +gpu=rtx3060"
    assert (plan.device, plan.here, round(plan.capacity_gb)) == ("NVIDIA GeForce RTX 3060", True, 11)
    assert (config.train.bf16, config.train.optim, config.model.dtype) == (True, "adamw_8bit", "bfloat16")
    assert compose_now("+gpu=auto", "model=smollm3_3b").model.model_name_or_path == "HuggingFaceTB/SmolLM3-3B"
    assert compose_now("+gpu=auto", "gpu.memory_gb=8").gpu.memory_gb == 8


def test_auto_computes_in_float16_without_bfloat16(composed: Compose, one_gpu: Callable[..., None]) -> None:
    one_gpu("Quadro RTX 6000", 24, (7, 5))
    config = compose_now("+gpu=auto")
    assert (config.train.bf16, config.train.fp16, config.model.dtype) == (False, True, "float16")


def test_auto_says_that_one_of_several_gpus_is_used(composed: Compose, one_gpu: Callable[..., None]) -> None:
    one_gpu("NVIDIA L4", 22.5, (8, 9), 4)
    assert compose_now("+gpu=auto").gpu.found.endswith("one of 4 GPUs is used: launch.processes=auto uses all")
    assert "one of" not in compose_now("+gpu=auto", "launch.processes=4").gpu.found


def test_auto_without_a_gpu_is_one_line(composed: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus.gpu_here.cache_clear()
    monkeypatch.setattr(local_gpu, "free_gpu_memory", lambda processes: None)
    config = composed("+gpu=any", "gpu.profile=auto")
    with pytest.raises(
        ConfigError, match=r"^\+gpu=auto: no GPU was found here; leave it out to train on the CPU, or name"
    ):
        check(config)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (("gpu.profile=h1000",), "gpu.profile=h1000: not in grpo/config/gpus.json; possible: auto, any, t4"),
        (("gpu.vendor=intel",), "gpu.vendor=intel: possible: nvidia, amd, apple"),
        (("gpu.tflops=0",), "gpu.tflops=0: a positive number"),
        (("gpu.bandwidth_gb_s=-1",), "gpu.bandwidth_gb_s=-1: a positive number"),
    ],
)
def test_wrong_facts_are_one_line(composed: Compose, overrides: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check(composed("+gpu=h100", *overrides))
    assert str(raised.value).startswith(problem)


def of_pytorch(monkeypatch: pytest.MonkeyPatch, name: str, total: float, hip: str | None, **facts: object) -> None:
    """Put a GPU where PyTorch would ask its driver for it, and none where NVML would."""
    properties = SimpleNamespace(name=name, total_memory=total, is_integrated=0, **facts)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 0)
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(hardware, "build_of_pytorch", lambda: {"hip": hip})
    monkeypatch.setattr(local_gpu, "build_of_pytorch", lambda: {"hip": hip})
    monkeypatch.setattr(hardware.Path, "exists", lambda self: str(self) == "/dev/nvidiactl")
    answers = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "mem_get_info": lambda: (total - GB, total),
        "get_device_name": lambda: name,
        "get_device_properties": lambda index: properties,
        "is_bf16_supported": lambda including_emulation: True,
    }
    for key, answer in answers.items():
        monkeypatch.setattr(torch.cuda, key, answer)


def test_a_slice_is_read_by_pytorch_and_known_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    of_pytorch(monkeypatch, "NVIDIA A100-SXM4-80GB MIG 2g.20gb", 19.5 * GB, None, major=8, minor=0)
    found = local_gpu.local_gpu()
    assert found is not None
    assert (found.memory, found.compute, found.is_slice, found.vendor) == (19.5 * GB, "8.0", True, "nvidia")


def test_a_gpu_in_slices_has_no_memory_of_its_own(
    one_gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    one_gpu("NVIDIA A100-SXM4-80GB", 80, (8, 0))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMigMode", lambda index: (1, 1))
    assert [(gpu.total, gpu.free) for gpu in hardware.gpus_of_driver()] == [(0.0, 0.0)]


def test_a_gpu_of_amd_has_an_architecture_and_no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    of_pytorch(
        monkeypatch, "AMD Instinct MI325X", 256 * GB, "7.1.2", gcnArchName="gfx942:sramecc+:xnack-", major=9, minor=4
    )
    found = local_gpu.local_gpu()
    assert found is not None
    assert (found.vendor, found.compute, found.bf16, found.count) == ("amd", "gfx942", True, 1)
    assert resembled(found) == "mi325x"


def test_a_mac_has_the_memory_that_macos_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = psutil.virtual_memory()
    for module in (hardware, local_gpu):
        monkeypatch.setattr(module, "on_mac", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "get_name", lambda: "Apple M3 Max")
    for name, value in {"empty_cache": None, "driver_allocated_memory": 0, "recommended_max_memory": 3 * GB}.items():
        monkeypatch.setattr(torch.mps, name, lambda value=value: value)
    found = local_gpu.local_gpu()
    assert found is not None
    assert hardware.free_gpu_memory() == ("Apple M3 Max", 3 * GB, min(3.0 * GB, hardware.free_gpu_memory()[2]))
    assert (found.vendor, found.memory, found.shared) == ("apple", memory.total, True)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert local_gpu.local_gpu() is None
