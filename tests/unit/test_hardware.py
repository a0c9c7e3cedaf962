import subprocess
from pathlib import Path
from unittest import mock

import psutil
import pytest

from grpo.hardware import free_card_memory, host_memory

SMI = """0, GPU-aaaa1111-x, NVIDIA GeForce RTX 3080 Laptop GPU, 16384, 14000
1, GPU-bbbb2222-x, NVIDIA A100-SXM4-80GB, 81920, 80000
"""
MB = 2**20


def with_cards(output: str) -> object:
    return mock.patch("subprocess.run", return_value=subprocess.CompletedProcess([], 0, stdout=output))


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, ("NVIDIA GeForce RTX 3080 Laptop GPU", 16384 * MB, 14000 * MB)),
        ("1", ("NVIDIA A100-SXM4-80GB", 81920 * MB, 80000 * MB)),
        ("GPU-bbbb", ("NVIDIA A100-SXM4-80GB", 81920 * MB, 80000 * MB)),
        ("0,1", ("NVIDIA GeForce RTX 3080 Laptop GPU", 16384 * MB, 14000 * MB)),
        ("", None),
    ],
)
def test_the_visible_card_with_least_free_memory_counts(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, found: object
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with with_cards(SMI):
        assert free_card_memory() == found


def test_a_machine_without_a_card_or_with_a_broken_driver_has_none() -> None:
    with mock.patch("subprocess.run", side_effect=FileNotFoundError):
        assert free_card_memory() is None
    with mock.patch("subprocess.run", side_effect=subprocess.CalledProcessError(9, "nvidia-smi")):
        assert free_card_memory() is None
    for numbers in ("[N/A], [N/A]", "16384, [Insufficient Permissions]"):
        with with_cards(f"0, GPU-x, Some card, {numbers}"):
            assert free_card_memory() is None


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
