"""What machine is this: cards and memory. PyTorch is imported only where it is asked, as planning does without it."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import psutil
from omegaconf import DictConfig

from grpo.errors import ConfigError
from grpo.limits import CONTEXT, GB


def describe() -> str:
    """Return the accelerators of this machine in words."""
    import torch

    cards = [
        f"{torch.cuda.get_device_name(i)} with {torch.cuda.get_device_properties(i).total_memory / GB:.0f} GB"
        for i in range(torch.cuda.device_count())
    ]
    return ", ".join(cards) or "no NVIDIA GPU"


def check_gpu(gpu: DictConfig | None) -> None:
    """Check that this machine has what a `+gpu=` profile was made for, before anything is loaded.

    A card may report a little less than its nominal memory, so 10 % are forgiven.

    Raises:
        ConfigError: naming what was found and how to go on without that card.
    """
    if gpu is None:
        return
    import torch

    here = max((torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())), default=0)
    lacking = "" if here >= 0.9 * gpu.memory_gb * GB else f"{gpu.memory_gb:g} GB"
    if not lacking and gpu.bf16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        lacking = "bfloat16"
    if lacking:
        raise ConfigError(
            f"+gpu: the profile is for {gpu.name} ({lacking} needed), found here: {describe()}. `python -m grpo.plan` "
            "says whether it would fit there, --cfg job shows its choices, plan.enforce=false tries them here anyway; "
            "leave +gpu out to run the embedded task"
        )


def visible_cards() -> list[str]:
    """Return the NVIDIA GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        words = [word.strip() for word in visible.split(",")]
        return [word for word in words if word and not word.startswith("-")]
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=10).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return []


def free_card_memory() -> tuple[str, float, float] | None:
    """Return name, total and free bytes of the NVIDIA GPU that a run would use; None without one.

    Several visible ones are taken to be alike, and the one with least free memory counts.
    """
    query = ["nvidia-smi", "--query-gpu=index,uuid,name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, check=True, timeout=10).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return card_of_pytorch()
    cards = [[part.strip() for part in line.split(",")] for line in lines if line.count(",") == 4]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        chosen = [word.strip() for word in visible.split(",")]
        cards = [
            card for card in cards if card[0] in chosen or any(word and card[1].startswith(word) for word in chosen)
        ]
    numbers = [
        (name, float(total) * 2**20, float(free) * 2**20 + own_card_memory())
        for _, _, name, total, free in cards
        if total.isdigit() and free.isdigit()
    ]
    return min(numbers, key=lambda card: card[2]) if numbers else card_of_pytorch()


def card_of_pytorch() -> tuple[str, float, float] | None:
    """Ask PyTorch where `nvidia-smi` says nothing: of a slice of a GPU (MIG), or of memory shared with the CPU."""
    if not Path("/dev/nvidiactl").exists():
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.get_device_name(), float(total), float(free) + own_card_memory()


def own_card_memory() -> float:
    """Return the bytes of the GPU that an earlier run of this process has left to it, after freeing what can be."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0.0
    gc.collect()
    torch.cuda.empty_cache()
    return CONTEXT + torch.cuda.memory_reserved()


def host_memory(root: Path = Path("/")) -> tuple[float, float]:
    """Return bytes of host memory, used and in all: the machine's, or those of a control group with less left.

    Cached files that the kernel would drop do not count as used. Control groups (Docker, Kubernetes, Slurm) limit each
    of their ancestors too; see the kernel's cgroup-v2.rst and cgroup-v1/memory.rst.

    Args:
        root: where `proc` and `sys` are.
    """
    memory = psutil.virtual_memory()
    found = [(float(memory.total - memory.available), float(memory.total))]
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
                    found.append((float(int(used) - files), float(limit)))
            except (OSError, ValueError):
                continue  # the root group has no limit, and inside a container the path may not exist
    return min(found, key=lambda pair: pair[1] - pair[0])
