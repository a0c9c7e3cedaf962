"""A new project: its files, and names and folders that it cannot have."""

import json
import subprocess
from pathlib import Path

import pytest

from grpo.extras.testing.commands import command


def init(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return command("grpo.init", *words, cwd=cwd)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("init")
    done = init("my project/my-project", cwd=folder)
    assert done.returncode == 0, done.stderr
    *files, last = done.stdout.splitlines()
    assert "my project/my-project/conf/task/my-project.yaml" in files
    assert all((folder / file).is_file() for file in files)
    assert last.startswith("cd 'my project/my-project' && python -m grpo.train +experiment=my-project ")
    return folder / "my project" / "my-project"


def test_the_files_have_the_name_and_the_rows_are_problems(project: Path) -> None:
    rows = [json.loads(line) for line in (project / "problems.jsonl").read_text().splitlines()]
    assert len({row["question"] for row in rows}) == len(rows) == 250
    assert rows[0].keys() == {"question", "answer", "steps"}
    texts = [file.read_text() for file in project.rglob("*.*") if file.is_file()]
    assert not any("NAME" in text for text in texts)


def test_the_reward_of_a_project_has_no_issues(project: Path) -> None:
    done = command("rewards.check", "exact_answer", f"task={project.name}", cwd=project)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no issues found" in done.stdout


def test_a_project_is_planned_and_trains_in_its_folder(project: Path) -> None:
    planned = command("grpo.plan", "+gpu=rtx3080", "+experiment=my-project", "model=qwen3_0_6b", cwd=project)
    assert "\nfits\n" in planned.stdout, planned.stderr
    small = ["train.max_steps=1", "train.per_device_train_batch_size=16", "task.eval.size=4", "hydra.run.dir=run"]
    done = command("grpo.train", "+experiment=my-project", *small, cwd=project)
    assert done.returncode == 0, done.stderr
    assert "200 problems to train on\n" in done.stderr
    logged = json.loads((project / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert "rewards/exact_answer/mean" in logged


def test_the_commands_of_its_readme_have_its_files(project: Path) -> None:
    text = (project / "README.md").read_text()
    assert "+experiment=my-project" in text
    named = {
        word.partition(":")[0] for word in text.replace("`", " ").split() if word.endswith((".jsonl", ".yaml", ".py"))
    }
    assert {"problems.jsonl", "my_rewards.py", "conf/reward/exact_answer.yaml"} <= named
    assert all((project / file).is_file() for file in named)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("used", "used: there are files in it, or it is a file; name a new folder"),
        ("file", "file: there are files in it, or it is a file; name a new folder"),
        ("gsm8k", "gsm8k: this trainer has a task or an experiment of that name; choose another"),
        ("calculator", "calculator: this trainer has a task or an experiment of that name; choose another"),
        ("1a", "'1a': the name of a project has letters, digits, _ and -, and begins with a letter"),
        ("a b", "'a b': the name of a project has letters, digits, _ and -, and begins with a letter"),
        ("True", "'True': the name of a project has letters, digits, _ and -, and begins with a letter"),
        ("file/below", "file/below: Not a directory"),
    ],
)
def test_a_folder_or_a_name_that_cannot_be_is_a_line(word: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "a").touch()
    (tmp_path / "file").touch()
    done = init(word, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"grpo.init: {message}\n")
    assert {path.name for path in tmp_path.rglob("*")} == {"used", "a", "file"}


def test_an_empty_folder_becomes_a_project(tmp_path: Path) -> None:
    assert init(".", cwd=tmp_path / "..").returncode == 2
    (tmp_path / "words").mkdir()
    done = init(".", cwd=tmp_path / "words")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "words" / "conf" / "task" / "words.yaml").is_file()
