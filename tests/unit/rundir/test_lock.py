"""One run per directory."""

import errno
import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from grpo.rundir.directory import check_directory
from grpo.rundir.lock import LOCK, is_running, new_directory, take
from grpo.utils.errors import ConfigError


@pytest.fixture
def other(tmp_path: Path) -> subprocess.Popen[str]:
    """Another process that has the directory."""
    script = f"import time; from pathlib import Path; from grpo.rundir.lock import take; take(Path({str(tmp_path)!r}))"
    line = [sys.executable, "-c", f"{script}; print('taken', flush=True); time.sleep(60)"]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == "taken\n"
    return process


def test_a_directory_has_one_process_until_that_process_dies(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    assert is_running(tmp_path)
    with pytest.raises(ConfigError, match=rf"process {other.pid} on .* trains in it: wait for it"):
        take(tmp_path)
    with pytest.raises(ConfigError, match=f"process {other.pid} "):
        check_directory(tmp_path, "auto")
    os.kill(other.pid, signal.SIGKILL)
    other.wait()
    assert not is_running(tmp_path)
    take(tmp_path)
    assert (tmp_path / ".running").read_text().startswith(f"process {os.getpid()} on ")


def test_a_look_at_a_lock_does_not_stop_another_from_taking(tmp_path: Path) -> None:
    (tmp_path / LOCK).touch()
    with (tmp_path / LOCK).open() as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)  # as `is_running` does, for a moment
        threading.Timer(0.2, fcntl.flock, (looking, fcntl.LOCK_UN)).start()
        take(tmp_path)
    assert is_running(tmp_path)


def taken_among_others(run_dir: Path) -> bool:
    try:
        take(run_dir)
    except ConfigError:
        return False
    time.sleep(1)
    return True


def test_of_processes_that_take_at_once_a_single_one_does(tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(8) as pool:
        for _ in range(200):
            pool.apply_async(is_running, (tmp_path,))
        assert sum(pool.map(taken_among_others, [tmp_path] * 8, chunksize=1)) == 1


def make_directory(root: str) -> str:
    return new_directory.__wrapped__(root)


def test_runs_that_begin_in_one_second_have_own_directories(tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(4) as pool:
        made = pool.map(make_directory, [str(tmp_path)] * 20)
    assert len(set(made)) == 20
    assert all(Path(folder).is_dir() for folder in made)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_lets_runs_train(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refused)
    take(tmp_path)
    assert not is_running(tmp_path)


def test_a_run_removes_what_killed_processes_left(tmp_path: Path) -> None:
    (tmp_path / ".hydra").mkdir()
    (tmp_path / "model.partial").mkdir()
    for name in ("summary.json.partial-7", "report.html.partial-0a1b", ".hydra/overrides.yaml.partial-7", "mine.txt"):
        (tmp_path / name).touch()
    take(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".hydra", ".running", "mine.txt"]
    assert not list((tmp_path / ".hydra").iterdir())
