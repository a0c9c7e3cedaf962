"""This machine: its GPUs and its memory. Functions import PyTorch only if they need it, because planning does not."""

import contextlib
import gc
import os
import platform
import runpy
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import pynvml

from grpo.utils.distributed import is_launched
from grpo.utils.errors import ConfigError
from grpo.utils.limits import CONTEXT, GB, held_back, on_wsl, working_set

if TYPE_CHECKING:
    from omegaconf import DictConfig


def check_gpu(gpu: "DictConfig | None") -> None:
    """Check that this machine has the GPU that a `+gpu=` profile was made for, before anything is loaded.

    A GPU may report a little less than its nominal memory, so the check tolerates 10 %.

    Raises:
        ConfigError: another GPU was found; the message has the way to continue.
    """
    if gpu is None:
        return
    import torch

    present, needed = "no GPU", gpu.memory_gb
    if gpu.vendor == "apple":
        needed, here = working_set(needed), gpu_of_mac() if on_mac() else None
        lacking = "" if here and here[1] >= 0.9 * needed * GB else f"{needed:.1f} GiB of a Mac's GPU"
        present = f"{here[0]} with {here[1] / GB:.0f} GiB" if here else present
    else:
        several = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        largest = max((device.total_memory for device in several), default=0)
        lacking = "" if largest >= 0.9 * needed * GB else f"{needed:g} GiB"
        if not lacking and (gpu.vendor == "amd") != bool(torch.version.hip):
            lacking = "a GPU of AMD" if gpu.vendor == "amd" else "a GPU of NVIDIA"
        if not lacking and gpu.bf16 and not torch.cuda.is_bf16_supported(including_emulation=False):
            lacking = "bfloat16"
        present = ", ".join(f"{device.name} with {device.total_memory / GB:.0f} GiB" for device in several) or present
    if lacking:
        raise ConfigError(
            f"+gpu: the profile is for {gpu.name} ({lacking} needed), found here: {present}. `python -m grpo.plan` "
            "says whether it would fit there, --cfg job shows its choices, plan.enforce=false tries them here anyway; "
            "leave +gpu out to run the built-in task"
        )


class Gpu(NamedTuple):
    """An NVIDIA GPU as its driver describes it."""

    number: str
    uuid: str
    name: str
    total: float
    """Bytes; 0 where the driver cannot say, as of memory shared with the CPU."""
    free: float
    """Bytes."""
    compute: str = ""
    """Compute capability, `8.6`; empty where the driver cannot say."""


def gpus_of_driver() -> list[Gpu]:
    """Return the GPUs of this machine by NVML, the library of NVIDIA's driver.

    A GPU in slices (MIG) has no memory here: a process gets one slice, whose memory PyTorch knows.
    """
    gpus: list[Gpu] = []
    try:
        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            total = free = 0
            compute, in_slices = "", False
            with contextlib.suppress(pynvml.NVMLError):
                memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
                total, free = memory.total, memory.free
            with contextlib.suppress(pynvml.NVMLError):
                compute = "{}.{}".format(*pynvml.nvmlDeviceGetCudaComputeCapability(handle))
            with contextlib.suppress(pynvml.NVMLError):
                in_slices = pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE
            name, uuid = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle)
            sizes = (0.0, 0.0) if in_slices else (float(total), float(free))
            gpus.append(Gpu(str(index), uuid, name, *sizes, compute))
    except pynvml.NVMLError:  # no driver, or a broken one
        pass
    return gpus


def on_mac() -> bool:
    """Whether this is a Mac with Apple silicon."""
    return sys.platform == "darwin" and platform.machine() == "arm64"


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them, which AMD's runtime reads too.

    Of AMD's GPUs PyTorch tells the number; a Mac has one that nothing can hide.
    """
    if on_mac():
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if build_of_pytorch().get("hip"):
        visible = os.environ.get("HIP_VISIBLE_DEVICES", visible)
        if visible is None:
            import torch

            return [str(index) for index in range(torch.cuda.device_count())]
    if visible is None:
        return [gpu.number for gpu in gpus_of_driver()]
    words = [word.strip() for word in visible.split(",")]
    return [word for word in words if word and not word.startswith("-")]


def seen_alone(devices: str) -> dict[str, str]:
    """Return the environment in which a process sees only these GPUs, numbers or names separated by commas.

    AMD's runtime reads both variables, and vLLM refuses two that differ.
    """
    names = ("CUDA_VISIBLE_DEVICES", *(("HIP_VISIBLE_DEVICES",) if build_of_pytorch().get("hip") else ()))
    return dict.fromkeys(names, devices)


def described_gpus() -> dict[str, Gpu]:
    """Return the visible GPUs that the driver describes, by their names in CUDA_VISIBLE_DEVICES."""
    gpus = gpus_of_driver()
    return {
        name: gpu
        for name in visible_gpus()
        for gpu in gpus
        if gpu.number == name or (name.startswith("GPU-") and gpu.uuid.startswith(name))
    }


def free_gpu_memory(processes: int = 1) -> tuple[str, float, float] | None:
    """Return name, total and free bytes of the GPU that a run would use; None without a GPU.

    A single process takes the GPU with the most free memory; several processes take a GPU each, and the GPU with the
    least free memory counts. Memory that the driver reports as free and does not give, as on WSL2, does not count.
    """
    gpus = [gpu for gpu in described_gpus().values() if gpu.total]
    if not gpus:
        return gpu_of_pytorch()
    chosen = (max if processes == 1 else min)(gpus, key=lambda gpu: gpu.free)
    return chosen.name, chosen.total, max(0.0, chosen.free + own_gpu_memory() - held_back())


def take_one_gpu() -> str | None:
    """Restrict a process without a launcher to the visible GPU with the most free memory; return a line about it.

    With several GPUs, TRL would spread the layers of a policy over them (`device_map="auto"`). This function queries
    only the driver: CUDA reads CUDA_VISIBLE_DEVICES once, at its initialization, and with PCI_BUS_ID its numbers are
    the driver's.

    Raises:
        ConfigError: PyTorch would train on a GPU of Intel, which has another interface than `torch.cuda`.
    """
    if build_of_pytorch().get("xpu"):
        import torch

        if torch.xpu.is_available():
            raise ConfigError(
                f"PyTorch {torch.__version__} would train on {torch.xpu.get_device_name()}, and GPUs of Intel are not "
                "supported: train.use_cpu=true trains on the CPU"
            )
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    visible, described = visible_gpus(), described_gpus()
    if is_launched() or len(visible) < 2 or build_of_pytorch().get("hip"):  # AMD's: `check_pytorch_sees_gpu`
        return None
    chosen = max(visible, key=lambda name: described[name].free if name in described else 0.0)
    os.environ["CUDA_VISIBLE_DEVICES"] = chosen
    gpu = described.get(chosen)
    label = f"{chosen} ({gpu.name}, {gpu.free / GB:.1f} GiB free)" if gpu else chosen
    return f"one process takes one of {len(visible)} GPUs: {label}; CUDA_VISIBLE_DEVICES=… chooses another"


def use_expandable_segments() -> None:
    """Let PyTorch's allocator grow its segments, which leaves fewer fragments, unless the user has configured it.

    Has to be called before CUDA is initialised. See PyTorch's notes on CUDA semantics, "Optimizing memory usage". Many
    drivers of WSL2 refuse such a segment: https://github.com/pytorch/pytorch/issues/192330; on GPUs of AMD the first
    one may never return: https://github.com/pytorch/pytorch/issues/192259.
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    if not (on_wsl() or build_of_pytorch().get("hip") or any(name in os.environ for name in names)):
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"


def gpu_utilization() -> float | None:
    """Return the percentage of the last second in which this process's GPU computed; None if the driver cannot say."""
    visible, place = visible_gpus(), int(os.environ.get("LOCAL_RANK", "0"))
    gpu = described_gpus().get(visible[place]) if place < len(visible) else None
    try:
        return gpu and float(pynvml.nvmlDeviceGetUtilizationRates(pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)).gpu)
    except pynvml.NVMLError:
        return None


@cache
def build_of_pytorch() -> dict[str, Any]:
    """Return the build of PyTorch: its `cuda`, `hip` (AMD) and `xpu` (Intel) versions, without importing it."""
    spec = find_spec("torch")
    return runpy.run_path(str(Path(str(spec.origin)).with_name("version.py"))) if spec else {}


def check_pytorch_sees_gpu() -> None:
    """Check that PyTorch can use the driver's GPU; otherwise a CPU would run a plan for a GPU.

    Raises:
        ConfigError: PyTorch cannot use it; the message has both versions and a remedy.
    """
    gpus, of_amd = described_gpus(), bool(build_of_pytorch().get("hip"))
    if not visible_gpus() and not of_amd:
        return
    import torch

    if torch.cuda.is_available():
        if of_amd and not is_launched() and torch.cuda.device_count() > 1:  # only NVIDIA's driver is asked for them
            raise ConfigError(
                f"there are {torch.cuda.device_count()} GPUs of AMD: HIP_VISIBLE_DEVICES=0 chooses one, "
                "`torchrun --nproc-per-node=…` uses several"
            )
        check_kernels()
        return
    if not gpus:
        return
    name = next(iter(gpus.values())).name
    driver, number = pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlSystemGetCudaDriverVersion_v2()
    supported = f"{number // 1000}.{number % 1000 // 10}"
    if torch.version.cuda is None:
        built, remedy = "is built without CUDA", "`rm -rf .venv` and `make install` on this machine install one with it"
    else:
        built = f"is built for CUDA {torch.version.cuda}"
        remedy = f"update the driver, or install a build of PyTorch for CUDA {supported} or older"
    raise ConfigError(
        f"the driver {driver} (CUDA {supported}) has a GPU, {name}, and PyTorch {torch.__version__} {built} and cannot "
        f"use it: {remedy}; train.use_cpu=true trains on the CPU"
    )


def check_kernels() -> None:
    """Raise a ConfigError, with those that it has, unless PyTorch has kernels for the GPU of this process."""
    import torch

    index, built_for = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.get_arch_list()
    if torch.version.hip or not built_for or index >= torch.cuda.device_count():
        return
    major, minor = torch.cuda.get_device_capability(index)
    if not any(runs_on(architecture, major, minor) for architecture in built_for):
        raise ConfigError(
            f"{torch.cuda.get_device_name(index)} has compute capability {major}.{minor}, and PyTorch "
            f"{torch.__version__} has kernels for {', '.join(built_for)} only: install a build of PyTorch for "
            f"sm_{major}{minor}, as those for an older CUDA are; train.use_cpu=true trains on the CPU"
        )


def runs_on(architecture: str, major: int, minor: int) -> bool:
    """Tell whether a GPU of a compute capability runs code for an architecture, as `torch.cuda.get_arch_list` names it.

    Machine code (`sm_80`) runs on its major version, from its minor version on; PTX (`compute_80`) is compiled for any
    GPU as new or newer. With an `a`, either is for its version alone; with an `f`, for its major version. See NVIDIA's
    CUDA programming guide, "Compute capabilities".
    """
    kind, _, version = architecture.partition("_")
    built, wanted = int(version.rstrip("af")), 10 * major + minor
    if version.endswith("a"):
        return built == wanted
    return built <= wanted and (built // 10 == major or (kind == "compute" and not version.endswith("f")))


def gpu_of_pytorch() -> tuple[str, float, float] | None:
    """Read memory from PyTorch if NVML has none: a slice of a GPU (MIG), memory shared with the CPU, AMD, Apple."""
    if on_mac():
        return gpu_of_mac()
    if not (Path("/dev/nvidiactl").exists() or build_of_pytorch().get("hip")):
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.get_device_name(), float(total), float(free) + own_gpu_memory()


def gpu_of_mac() -> tuple[str, float, float] | None:
    """Return name, total and free bytes of a Mac's GPU: as much of the memory as macOS lets it use."""
    import torch

    if not torch.backends.mps.is_available():
        return None
    gc.collect()
    torch.mps.empty_cache()
    allocated, total = torch.mps.driver_allocated_memory(), torch.mps.recommended_max_memory()
    free = min(total, psutil.virtual_memory().available + allocated)
    return torch.backends.mps.get_name(), float(total), float(free)


def own_gpu_memory() -> float:
    """Return the GPU bytes that an earlier run of this process still holds, after freeing its caches."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0.0
    gc.collect()
    torch.cuda.empty_cache()
    return CONTEXT + torch.cuda.memory_reserved()


def host_memory(root: Path = Path("/")) -> tuple[float, float]:
    """Return bytes of host memory, used and total: of the machine, or of a control group with less free memory.

    Cached files that the kernel would drop do not count as used. Control groups (Docker, Kubernetes, Slurm) limit each
    of their ancestors too; see the kernel's cgroup-v2.rst and cgroup-v1/memory.rst. `root` has `proc` and `sys`.
    """
    memory = psutil.virtual_memory()
    pairs = [(float(memory.total - memory.available), float(memory.total))]
    file = root / "proc/self/cgroup"
    for line in file.read_text().splitlines() if file.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = root / "sys/fs/cgroup", ("memory.current", "memory.max", "inactive_file", "active_file")
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            names = ("memory.usage_in_bytes", "memory.limit_in_bytes", "total_inactive_file", "total_active_file")
        else:
            continue
        group = top / path.lstrip("/")
        for folder in [group, *group.parents]:
            if not folder.is_relative_to(top):
                break
            try:
                used, limit = ((folder / name).read_text().strip() for name in names[:2])
                cached = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                if limit != "max" and int(limit) < memory.total:
                    files = sum(int(cached.get(name, 0)) for name in names[2:])
                    pairs.append((float(int(used) - files), float(limit)))
            except (OSError, ValueError):
                continue  # the root group has no limit, and inside a container the path may not exist
    return min(pairs, key=lambda pair: pair[1] - pair[0])
