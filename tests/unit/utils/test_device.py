"""The device that PyTorch computes on; only the driver of a Mac's GPU is in place of one."""

from pathlib import Path

import pytest
import torch
from accelerate.utils import is_mps_available
from omegaconf import OmegaConf

from grpo.trainer.measurements import MemoryReadings, StepClock
from grpo.utils import device, hardware
from grpo.utils.device import kind_of_device, memory_of_gpu, wait_for
from grpo.utils.errors import ConfigError
from grpo.utils.hardware import check_gpu, check_pytorch_sees_gpu, take_one_gpu, visible_gpus

GB = 2**30


class MetalDriver:
    """What `torch.mps` answers on a Mac of 16 GiB, with what a test says its allocator holds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held, self.waited = 0, 0
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
        monkeypatch.setattr(torch.backends.mps, "is_built", lambda: True)
        monkeypatch.setattr(torch.backends.mps, "get_name", lambda: "Apple M1")
        monkeypatch.setattr(torch.mps, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.mps, "synchronize", self.synchronize)
        monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: self.held)
        monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 11 * GB)

    def synchronize(self) -> None:
        self.waited += 1


@pytest.fixture
def metal(monkeypatch: pytest.MonkeyPatch) -> MetalDriver:
    return MetalDriver(monkeypatch)


def test_a_mac_computes_on_mps_and_others_as_before(metal: MetalDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (kind_of_device(), memory_of_gpu()) == ("mps", 11 * GB)
    assert is_mps_available(), "accelerate chooses it for the same reason"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert kind_of_device() == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert kind_of_device() == "cuda"


def test_the_clock_waits_for_the_gpu_of_a_mac(metal: MetalDriver) -> None:
    with StepClock(torch.device("mps")).of("update"):
        pass
    wait_for(torch.device("mps"))
    wait_for(torch.device("cpu"))
    assert metal.waited == 2


def test_the_memory_of_a_mac_is_what_its_allocator_holds(metal: MetalDriver) -> None:
    readings = MemoryReadings(on_gpu=True)
    with readings.of("generate"):
        metal.held = 3 * GB
    with readings.of("update"):
        metal.held = 5 * GB
    assert (readings.highest["memory/generate_gb"], readings.highest["memory/update_gb"]) == (3, 5)
    assert readings.highest["memory/peak_reserved_gb"] == 5


def test_host_memory_is_read_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    with_proc = MemoryReadings(on_gpu=False).since_log()["memory/host_gb"]

    def missing(self: Path, *args: object) -> str:
        raise FileNotFoundError(self)

    monkeypatch.setattr(Path, "read_text", missing)
    monkeypatch.setattr(Path, "write_text", missing)
    assert 0.05 < MemoryReadings(on_gpu=False).since_log()["memory/host_gb"] <= with_proc + 0.01


def test_a_profile_for_a_mac_is_checked_on_one(metal: MetalDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"name": "Apple silicon", "vendor": "apple", "memory_gb": 16.0, "bf16": True}
    monkeypatch.setattr(hardware, "on_mac", lambda: True)
    check_gpu(OmegaConf.create(facts))
    with pytest.raises(ConfigError, match=r"48\.0 GiB of a Mac's GPU needed\), found here: Apple M1 with 11 GiB"):
        check_gpu(OmegaConf.create(facts | {"memory_gb": 64.0}))
    assert visible_gpus() == []
    assert take_one_gpu() is None
    check_pytorch_sees_gpu()
    monkeypatch.setattr(hardware, "on_mac", lambda: False)
    with pytest.raises(ConfigError, match=r"10\.7 GiB of a Mac's GPU needed\), found here: no GPU"):
        check_gpu(OmegaConf.create(facts))


def test_nvidias_profile_is_not_for_a_gpu_of_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = type("Properties", (), {"name": "AMD Instinct MI300X", "total_memory": 192 * GB})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(torch.version, "hip", "7.1")
    facts = {"name": "AMD Instinct MI300X", "vendor": "amd", "memory_gb": 192.0, "bf16": True}
    check_gpu(OmegaConf.create(facts))
    with pytest.raises(ConfigError, match="a GPU of NVIDIA needed"):
        check_gpu(OmegaConf.create(facts | {"name": "NVIDIA H100", "vendor": "nvidia", "memory_gb": 80.0}))
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(ConfigError, match="a GPU of AMD needed"):
        check_gpu(OmegaConf.create(facts))


def test_amd_gets_no_expandable_segments_and_own_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "HIP_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert hardware.seen_alone("2") == {"CUDA_VISIBLE_DEVICES": "2"}
    monkeypatch.setattr(hardware, "build_of_pytorch", lambda: {"hip": "7.1"})
    hardware.use_expandable_segments()
    assert "PYTORCH_CUDA_ALLOC_CONF" not in hardware.os.environ
    assert visible_gpus() == ["0", "1", "2", "3"]
    assert hardware.seen_alone("2") == {"CUDA_VISIBLE_DEVICES": "2", "HIP_VISIBLE_DEVICES": "2"}
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "3")
    assert visible_gpus() == ["3"]
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "-1")
    assert visible_gpus() == []
    assert take_one_gpu() is None
    assert device.kind_of_device() == "cpu"
