"""What the libraries say when a disk is full is recognised, and other errors are not."""

import contextlib
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import save_file

from grpo.rundir.storage import storage_fault

MIB = 2**20
WRITE: dict[str, Callable[[Path], None]] = {
    "text": lambda file: file.write_text(json.dumps("x" * MIB)),
    "torch": lambda file: torch.save(torch.zeros(MIB), file),
    "safetensors": lambda file: save_file({"weight": torch.zeros(MIB)}, file),
    "parquet": lambda file: pyarrow.parquet.write_table(pyarrow.table({"column": [os.urandom(MIB)]}), file),
}


@pytest.mark.parametrize("library", WRITE)
def test_a_full_disk_is_recognised_in_what_each_library_raises(library: str, small_disk: Path) -> None:
    with (small_disk / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(bytes(MIB))
    with pytest.raises(Exception, match=r"No space left|file write failed|unexpected pos|PytorchStream") as caught:
        WRITE[library](small_disk / "file")
    fault = storage_fault(caught.value, small_disk)
    assert fault is not None
    assert "disk" in fault
    assert "0.0 GiB free" in fault
    assert "\n" not in fault
    later = ValueError("something that came of it")
    later.__context__ = caught.value
    assert storage_fault(later, small_disk) == fault


def test_quotas_are_named_and_other_errors_are_not_of_the_disk(tmp_path: Path) -> None:
    assert "quota" in (storage_fault(OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), tmp_path) or "")
    assert storage_fault(FileNotFoundError(errno.ENOENT, "no such file"), tmp_path) is None
    assert storage_fault(RuntimeError("CUDA error: an illegal memory access"), tmp_path) is None
    assert "has been removed" in (storage_fault(RuntimeError("any"), tmp_path / "gone") or "")


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOTCONN, errno.EPIPE, errno.ENODEV])
def test_an_error_without_a_file_is_not_of_the_disk(number: int, tmp_path: Path) -> None:
    assert storage_fault(OSError(number, os.strerror(number)), tmp_path) is None
    is_of_disk = storage_fault(OSError(number, os.strerror(number), str(tmp_path / "file")), tmp_path) is not None
    assert is_of_disk == (number != errno.EPIPE)


def test_a_file_that_pytorch_cannot_open_is_of_the_disk(tmp_path: Path) -> None:
    def error(number: int) -> RuntimeError:
        where = "[enforce fail at inline_container.cc:747] . "
        return RuntimeError(f"{where}open file failed with strerror: {os.strerror(number)}")

    assert "has become read-only" in (storage_fault(error(errno.EROFS), tmp_path) or "")
    assert storage_fault(error(errno.ENOENT), tmp_path) is None


def test_what_another_disk_or_a_reward_says_is_not_of_this_disk(tmp_path: Path) -> None:
    elsewhere = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/dev/shm/other")
    assert storage_fault(elsewhere, tmp_path) is None
    assert storage_fault(OSError(errno.ENOSPC, "full", str(tmp_path / "file")), tmp_path) is not None
    assert (
        storage_fault(RuntimeError("reward.mine: OSError: [Errno 30] Read-only file system: '/data'"), tmp_path) is None
    )


def test_a_directory_that_cannot_be_reached_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> bool:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(Path, "is_dir", gone)
    assert "cannot be reached: Stale file handle" in (storage_fault(OSError(errno.EIO, "x"), tmp_path) or "")
