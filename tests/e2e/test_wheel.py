"""The wheel, without the checkout beside it: built, installed into an empty folder, and run from elsewhere."""

import os
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from grpo.config.schema import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.long]

PACKAGES = ("grpo", "rewards", "conf")
DEMOS = {"words": [], "shapes": ["+experiment=shapes"], "calculator": ["+experiment=calculator"]}
SAYS = {
    "grpo.train": "rtx3080",
    "grpo.plan": "fits",
    "rewards.check": "no issues found",
    "grpo.init": "task/words.yaml",
}
"""By command, a part of what it prints: choices of `conf/`, a plan, examples of `rewards/`."""
COMMANDS = [["grpo.train", "--help"], ["grpo.plan", "+gpu=h100"], ["rewards.check", "correctness"]]
COMMANDS += [["grpo.init", "words"]]
STEP = ["train.max_steps=1", "train.per_device_train_batch_size=8", "train.num_generations=4"]
STEP += ["task.dataset.size=8", "task.eval.size=2"]


def python(*words: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, *map(str, words)]
    return subprocess.run(
        line, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=300
    )


def files_of(folder: Path) -> set[str]:
    """All files of our packages below a folder."""
    found = (file for package in PACKAGES for file in (folder / package).rglob("*") if file.is_file())
    return {str(file.relative_to(folder)) for file in found if "__pycache__" not in file.parts}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder with the wheel in it; no network is needed."""
    folder = tmp_path_factory.mktemp("wheel")
    copy, site = folder / "copy", folder / "site"  # in the checkout itself the build would leave files
    for package in PACKAGES:
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    pip = ["-m", "pip", "--disable-pip-version-check"]
    built = python(*pip, "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", folder, copy, cwd=folder)
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("*.whl")
    installed = python(*pip, "install", "--no-deps", "--no-index", "--target", site, wheel, cwd=folder)
    assert installed.returncode == 0, installed.stderr
    return site


def test_the_wheel_has_every_file_of_the_packages(site: Path) -> None:
    assert files_of(site) == files_of(ROOT)


def test_the_metadata_are_those_of_the_project(site: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (wheel,) = distributions(path=[str(site)])
    assert (wheel.name, wheel.version) == (project["name"], project["version"])
    assert SpecifierSet(wheel.metadata["Requires-Python"]) == SpecifierSet(project["requires-python"])
    assert wheel.metadata["License-Expression"] == project["license"]
    assert {Requirement(each) for each in wheel.requires or () if "extra ==" not in each} == {
        Requirement(each) for each in project["dependencies"]
    }
    assert set(wheel.metadata.get_all("Provides-Extra")) == set(project["optional-dependencies"])
    assert (wheel.read_text("top_level.txt") or "").split() == sorted(PACKAGES)
    assert wheel.metadata["Description-Content-Type"] == "text/markdown"


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_commands_run_from_the_wheel(command: list[str], site: Path, tmp_path: Path) -> None:
    done = python("-m", *command, cwd=tmp_path, PYTHONPATH=str(site), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert str(ROOT) not in done.stdout + done.stderr
    assert SAYS[command[0]] in done.stdout


@pytest.mark.parametrize("demo", DEMOS)
def test_each_demo_trains_from_the_wheel(demo: str, site: Path, tmp_path: Path) -> None:
    environment = {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    where = python("-c", "import grpo, rewards; print(grpo.__file__, rewards.__file__)", cwd=tmp_path, **environment)
    assert where.stdout.split() == [str(site / name / "__init__.py") for name in ("grpo", "rewards")]
    composed = python("-m", "grpo.train", *DEMOS[demo], "--cfg", "job", cwd=tmp_path, **environment)
    assert composed.returncode == 0, composed.stderr
    assert "model_name_or_path: ${project:grpo/builtin/tiny" in composed.stdout
    run = python("-m", "grpo.train", *DEMOS[demo], *STEP, "hydra.run.dir=run", cwd=tmp_path, **environment)
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "run" / "model").is_dir()
    assert "</html>" in (tmp_path / "run" / "report.html").read_text()
    assert f"model_name_or_path: {site}/grpo/builtin/tiny" in (tmp_path / "run" / "resolved_config.yaml").read_text()
    assert '"steps": 1' in (tmp_path / "run" / "summary.json").read_text()
