"""Configurations of a user: folders that are found, and the words of a command line that has them elsewhere."""

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from grpo.config.folders import VARIABLE, check_names, config_flags, config_folders
from grpo.config.schema import ROOT
from grpo.extras.testing.commands import command
from grpo.utils.errors import ConfigError

TASK = "# @package _global_\ntask:\n  dataset: {generator: grpo.builtin.tasks.arithmetic.rows, size: SIZE, seed: 0}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with `conf/task/mine.yaml` in it, and two more such folders."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)
    for size, name in enumerate(("conf", "team conf", "typed"), 1):
        (tmp_path / name / "task").mkdir(parents=True)
        (tmp_path / name / "task" / "mine.yaml").write_text(TASK.replace("SIZE", str(size)))
    return tmp_path


def composed(module: str, *words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return command(module, *words, "--cfg", "job", "--package", "task.dataset", cwd=cwd, environment=environment)


@pytest.mark.parametrize(
    ("words", "variable", "size"), [((), "", 1), ((), "team conf", 2), (("--config-dir", "typed"), "team conf", 3)]
)
def test_conf_then_the_variable_then_the_option_win(
    words: tuple[str, ...], variable: str, size: int, folder: Path
) -> None:
    done = composed("grpo.train", *words, "task=mine", cwd=folder, **{VARIABLE: variable})
    assert done.returncode == 0, done.stderr
    assert f"size: {size}\n" in done.stdout


def test_help_lists_the_choices_of_conf(folder: Path) -> None:
    assert ", mine, " in command("grpo.train", "--help", cwd=folder).stdout


def test_a_variable_that_names_no_directory_is_a_line(folder: Path) -> None:
    done = command("grpo.plan", cwd=folder, environment={VARIABLE: "nowhere"})
    assert done.returncode == 2
    assert (
        done.stderr == f"grpo.plan: {VARIABLE}=nowhere: there is no such directory; correct it, or unset {VARIABLE}\n"
    )


def test_a_file_that_would_not_be_used_is_a_line(folder: Path) -> None:
    (folder / "conf" / "reward").mkdir()
    for file in ("task/sums.yaml", "reward/format.yaml"):
        (folder / "conf" / file).write_text((ROOT / "conf" / file).read_text())
    assert command("grpo.plan", "task=sums", "+reward=format", cwd=folder).returncode == 0, "the same as the project's"
    for file, words in (("task/sums.yaml", ["task=sums"]), ("reward/format.yaml", ["+reward=format"])):
        (folder / "conf" / file).write_text((ROOT / "conf" / file).read_text() + "# changed\n")
        done = command("grpo.plan", *words, cwd=folder)
        choice = file.removesuffix(".yaml").replace("/", "=")
        assert done.returncode == 2
        assert done.stderr == f"grpo.plan: conf/{file}: {choice} is a choice of this project; rename the file\n"
    assert command("grpo.plan", cwd=folder).returncode == 0, "neither is chosen"


def test_the_configurations_of_this_project_are_found_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "conf")
    assert config_folders() == [folder / "conf"]
    monkeypatch.setenv(VARIABLE, str(ROOT / "conf"))
    monkeypatch.chdir(ROOT)
    assert config_folders() == []


def of_hydra(name: str, *sources: tuple[str, Path]) -> dict[str, Any]:
    """Hydra's configuration of a run with folders, each with its provider."""
    listed = [{"provider": provider, "path": str(path), "schema": "file"} for provider, path in sources]
    return {"runtime": {"config_sources": listed}, "job": {"config_name": name}}


def test_words_for_folders_are_those_that_are_not_found_here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main, conf, team = ("main", ROOT / "conf"), ("found", folder / "conf"), ("found", folder / "team conf")
    typed = ("command-line", folder / "typed")
    assert config_flags(of_hydra("config", main, conf)) == []
    assert config_flags(of_hydra("other", main, typed, conf)) == [f"--config-dir={typed[1]}", "--config-name=other"]
    assert config_flags(of_hydra("config", main, team, conf)) == [f"--config-dir={team[1]}"]
    monkeypatch.chdir(folder / "typed")
    further = f"hydra.searchpath=['file://{team[1]}','file://{conf[1]}']"
    assert config_flags(of_hydra("config", main, typed, team, conf)) == [f"--config-dir={typed[1]}", further]


def test_a_run_with_folders_is_reproduced_elsewhere(folder: Path) -> None:
    line = ["task=mine", "+reward=[a,b]", "hydra.run.dir=run", "train.max_steps=1"]
    for name, place in (("a", "conf"), ("b", "team conf")):
        (folder / place / "reward").mkdir()
        (folder / place / "reward" / f"{name}.yaml").write_text(f"{name}: {{fn: rewards.brevity.brevity}}\n")
    done = composed("grpo.train", *line, "--config-dir", "team conf", cwd=folder)
    assert done.returncode == 0, done.stderr
    flags = config_flags(
        of_hydra("config", ("command-line", folder / "team conf"), ("found", folder / "conf"))
    )  # as typed here
    assert flags == [f"--config-dir={folder / 'team conf'}"]
    (folder / "elsewhere").mkdir()
    words = [f"--config-dir={folder / 'team conf'}", f"hydra.searchpath=['file://{folder / 'conf'}']"]
    again = composed("grpo.train", *shlex.split(shlex.join([*words, *line])), cwd=folder / "elsewhere")
    assert again.stdout == done.stdout
    assert again.returncode == 0, again.stderr


def test_names_are_compared_in_groups_with_a_package(folder: Path) -> None:
    (folder / "conf" / "task" / "sums.yaml").write_text("task: {}\n")
    sources = [{"provider": "found", "path": str(folder / "conf")}]
    runtime = {"config_sources": sources, "choices": {"task@task.tasks.a": "sums", "hydra/env": None}}
    with pytest.raises(ConfigError, match=r"conf/task/sums\.yaml: task=sums is a choice of this project"):
        check_names(OmegaConf.create({"reward": {}, "hydra": {"runtime": runtime}}))
