"""One line for a package that is not there, wherever its absence shows."""

import gc
import importlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from grpo.cli import leave, missing_package, quick_imports
from grpo.config.schema import ROOT, Gpu
from rewards.isolation.reward import Reward


@dataclass
class WithGpu:
    gpu: Gpu | None = None


def import_wrapped(name: str) -> None:
    """Import a module as a lazy library does, which raises an error of its own."""
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise RuntimeError(f"Failed to import {name}") from error


@pytest.mark.parametrize(("library", "command"), [("vllm", "make vllm"), ("some_library", "make install")])
def test_a_missing_package_is_one_line_with_how_to_install_it(
    library: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / library).mkdir()
    (tmp_path / library / "__init__.py").write_text("import not_there.inside\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, library, raising=False)
    with pytest.raises(RuntimeError) as raised:
        import_wrapped(library)
    with pytest.raises(SystemExit) as left:
        leave(raised.value, "grpo.train")
    assert left.value.code == 2
    errors = capsys.readouterr().err
    assert errors.startswith("grpo.train: the package not_there is not installed, and ")
    assert f"`{command}` installs it" in errors
    assert errors.count("\n") == 1


def test_other_errors_are_not_taken_for_a_missing_package() -> None:
    assert missing_package(RuntimeError("something else")) is None
    assert missing_package(ImportError("cannot import name x")) is None


def test_a_value_for_a_gpu_without_a_profile_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AssertionError) as raised:
        OmegaConf.update(OmegaConf.structured(WithGpu), "gpu.memory_gb", 3)  # as Hydra does
    with pytest.raises(SystemExit) as left:
        leave(raised.value, "grpo.plan")
    assert left.value.code == 2
    assert capsys.readouterr().err == (
        "grpo.plan: gpu.…: there is no GPU profile to change; append one, +gpu=any or one for the GPU\n"
    )


def test_imports_collect_no_garbage_and_a_second_job_still_does() -> None:
    gc.unfreeze()
    with quick_imports():
        assert not gc.isenabled()
    assert gc.isenabled()
    exempt = gc.get_freeze_count()
    assert exempt > 0
    left: list[list[int]] = [[] for _ in range(1000)]
    with pytest.raises(ImportError), quick_imports():
        importlib.import_module("no_such_library")
    assert gc.isenabled()
    assert gc.get_freeze_count() <= exempt, left


def test_files_here_and_the_locale_do_not_break_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("rewards", "datasets", "yaml"):
        (tmp_path / f"{name}.py").write_text(
            "def length(completions, **columns):\n    return [1.0 for _ in completions]\n"
        )
    places = {"PYTHONPATH": str(ROOT), "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    line = [sys.executable, "-m", "grpo.report", "läufe"]
    done = subprocess.run(line, cwd=tmp_path, env=os.environ | places, capture_output=True, check=False)
    assert done.stderr.decode().startswith("grpo.report: läufe: there is no such directory;")
    assert done.returncode == 2
    monkeypatch.chdir(tmp_path)
    reward = Reward(name="length", fn="rewards.py:length")  # in a process that starts here
    assert reward.score(prompts=["?"], completions=["!"]) == [1.0]
    reward.close()
