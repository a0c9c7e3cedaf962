"""Files and folders that are written completely or not at all."""

import errno
import os
from pathlib import Path

import pytest

from grpo.utils.atomic import atomic
from grpo.utils.manifest import MANIFEST, difference, is_sealed, seal


def test_two_writers_of_a_file_do_not_meet(tmp_path: Path) -> None:
    file = tmp_path / "summary.json"
    with atomic(file) as first:
        first.write_text("first")
        with atomic(file) as second:  # of another container, whose process has the same number
            second.write_text("second")
        assert file.read_text() == "second"
    assert file.read_text() == "first"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("is_folder", [False, True])
def test_what_is_written_reaches_the_disk_before_its_name(
    is_folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []

    def fsync(descriptor: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        assert (tmp_path / "result").exists() == (flushed[-1] == tmp_path.name)
        raise OSError(errno.EINVAL, "a file system that cannot say so")

    monkeypatch.setattr(os, "fsync", fsync)
    with atomic(tmp_path / "result") as partial:
        if is_folder:
            partial.mkdir()
        (partial / "weights" if is_folder else partial).write_text("content")
    assert flushed[-1] == tmp_path.name
    assert ("weights" in flushed) == is_folder
    assert partial.name in flushed


def test_an_exception_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("before")

    def interrupted() -> None:
        with atomic(tmp_path / "file") as partial:
            partial.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]


@pytest.mark.parametrize("left", [f"{MANIFEST}.partial", f"{MANIFEST}.partial-0123", MANIFEST])
def test_a_seal_takes_nothing_of_a_killed_one(left: str, tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("content")
    (tmp_path / left).write_text("half of")
    seal(tmp_path)
    assert difference(tmp_path) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == [MANIFEST, "weights"]


def test_a_killed_seal_leaves_no_complete_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weights").write_text("content")
    seal(tmp_path)
    (tmp_path / "weights").write_text("other")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        seal(tmp_path)
    assert not is_sealed(tmp_path)
