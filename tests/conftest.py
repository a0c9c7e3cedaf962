"""What several test modules need."""

import functools
import gc
import logging
import os
import random
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import settings
from omegaconf import DictConfig

from grpo.config import gpus
from grpo.config.schema import ROOT, register
from grpo.planning import advice
from grpo.utils.local_gpu import LocalGpu
from grpo.utils.patching import replaced

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub: no test needs the network
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as grpo.train sets it where processes meet; read when torch loads
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything imports torch: a worker of pytest-xdist has one core

settings.register_profile("untimed", deadline=None)  # a machine may be busy
settings.load_profile("untimed")


class Deprecated(logging.Handler):
    """Makes an error of what a library logs as deprecated; of what it warns of, `filterwarnings` in pyproject.toml."""

    def emit(self, record: logging.LogRecord) -> None:
        if "deprecat" in record.getMessage().lower():
            raise DeprecationWarning(record.getMessage())


for library in ("transformers", "trl", "accelerate", "torch"):
    logging.getLogger(library).addHandler(Deprecated())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Draw an eighth of the long tests by the commit in DRAWN_BY, which `.ci/run` sets."""
    if commit := os.environ.get("DRAWN_BY"):
        long = [item for item in items if item.get_closest_marker("long")]
        others = set(long) - set(random.Random(commit).sample(long, -(-len(long) // 8)))
        config.hook.pytest_deselected(items=list(others))
        items[:] = [item for item in items if item not in others]


@pytest.fixture(scope="module", autouse=True)
def quick_garbage_collection() -> None:
    """Exempt what there is from later collections: accelerate asks for one in each training, which took most of it."""
    gc.collect()
    gc.freeze()


@functools.cache
def groups_of(choices: tuple[str, ...]) -> DictConfig:
    return compose("config", list(choices))


def is_group(key: str) -> bool:
    return key.startswith("hydra") or (ROOT / "conf" / key).is_dir()


def compose_quickly(name: str, overrides: list[str]) -> DictConfig:
    """What `hydra.compose` returns; the groups, which take most of its time, are composed once for each choice."""
    parsed = OverridesParser.create().parse_overrides(overrides)
    values = [one for one in parsed if not one.is_sweep_override() and not is_group(one.key_or_group)]
    config = groups_of(tuple(one.input_line for one in parsed if one not in values)).copy()
    ConfigLoaderImpl._apply_overrides_to_config(values, config)
    return config


@pytest.fixture(scope="session")
def composed() -> Iterator[Callable[..., DictConfig]]:
    """A function from overrides, as on the command line, to the composed configuration."""
    register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"), replaced(advice, "compose", compose_quickly):
        yield lambda *overrides: compose_quickly("config", list(overrides))


@pytest.fixture
def an_l4(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU of this machine, for `+gpu=auto`."""
    gpu = LocalGpu("NVIDIA L4", 22.5 * 2**30, "nvidia", "8.9", True, False, False, 1, False)
    monkeypatch.setattr(gpus, "gpu_here", lambda several: gpu)


@pytest.fixture(autouse=True)
def not_launched() -> None:
    """TRL sets these for a vLLM in this process: the commands of later tests would take them for torchrun's."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)


@pytest.fixture
def cuda_driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A CUDA driver with one GPU that nothing is on yet; see `tests.cuda_driver`."""
    from tests.cuda_driver import CudaDriver  # imports torch, after the settings above

    driver = CudaDriver()
    driver.install(monkeypatch)
    return driver


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 48 MiB, which only root can make."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "none", folder], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("no rights to mount a small disk")
    yield folder
    for place in (*folder.glob("*/checkpoint-*"), folder):
        subprocess.run(["umount", "-l", place], capture_output=True, check=False)
