"""The rows of a task in the check of a reward, as a run would find them."""

import json
from collections.abc import Callable
from pathlib import Path

import pandas
import pytest

from grpo.extras.testing.commands import command
from rewards.check import fn_and_kwargs
from rewards.probing.tasks import rows_of

ROWS = [{"problem": f"How much is {n} + 1?", "solution": f"It is so.\n#### {n + 1}", "level": n} for n in range(4)]
TASK = "# @package _global_\ntask:\n  dataset: {path: rows.jsonl}\n  prompt: 'Question: {problem}'\n"
TASK += "  answer: {column: solution, pattern: '####\\s*(.+)'}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a task and its rows."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / "task").mkdir(parents=True)
    (tmp_path / "conf" / "task" / "sums_of_mine.yaml").write_text(TASK)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


@pytest.mark.parametrize("name", ["sums_of_mine", "conf/task/sums_of_mine.yaml"])
def test_rows_have_prompt_answer_and_all_columns(name: str, folder: Path) -> None:
    rows = rows_of([f"task={name}"], 3)
    assert rows == [
        {**row, "question": f"Question: {row['problem']}", "answer": str(n + 1)} for n, row in enumerate(ROWS[:3])
    ]


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("rows.csv", lambda table, file: table.to_csv(file, index=False)),
        ("rows.parquet", lambda table, file: table.to_parquet(file)),
    ],
)
def test_files_of_tables_are_read(name: str, write: Callable[..., None], folder: Path) -> None:
    write(pandas.DataFrame(ROWS), folder / name)
    words = ["task=jsonl", f"task.dataset.path={name}", "task.prompt=problem", "task.answer.column=level"]
    assert [(row["question"], row["answer"], row["level"]) for row in rows_of(words, 2)] == [
        (row["problem"], str(row["level"]), row["level"]) for row in ROWS[:2]
    ]


def test_generators_and_the_folder_of_the_variable_are_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rows_of(["task=sums"], 2)[1]["question"].endswith(" =")
    (folder / "conf").rename(folder / "team")
    with pytest.raises(ValueError, match="task=sums_of_mine: no such task; name a YAML, or a file of conf/task"):
        rows_of(["task=sums_of_mine"], 2)
    monkeypatch.setenv("GRPO_CONFIG_DIR", "team")
    assert len(rows_of(["task=sums_of_mine"], 2)) == 2


def test_a_reward_of_the_folder_is_known_by_its_name(folder: Path) -> None:
    (folder / "conf" / "reward").mkdir()
    (folder / "conf" / "reward" / "brief.yaml").write_text("brief: {fn: mine.py:f, kwargs: {limit: 3, reason: x}}\n")
    assert fn_and_kwargs("brief", ["limit=4"]) == ("mine.py:f", {"limit": 4, "reason": "x"})


def test_the_check_takes_a_task_for_rows_that_a_reward_needs(folder: Path) -> None:
    (folder / "mine.py").write_text(
        "def by_level(completions, level, answer):\n"
        "    rows = zip(completions, level, answer)\n"
        "    return [float(text.endswith(f'#### {due}')) * (1 + at) for text, at, due in rows]\n"
    )
    done = command("rewards.check", "mine.py:by_level", "task=sums_of_mine", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no issues found" in done.stdout
    without = command("rewards.check", "mine.py:by_level", cwd=folder)
    assert without.returncode == 2
    assert "needs a column level, or an argument level=…; the rows have: question, solution, answer" in without.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["task=gsm8k"], "task=gsm8k: its rows are in openai/gsm8k; the check reads JSONL, CSV and Parquet: name "),
        (["task=jsonl"], "task=jsonl: it names no file: task.dataset.path=…; "),
        (
            ["task=sums_of_mine", "task.answer.column=x"],
            "task.answer.column=x: the rows have: problem, solution, level",
        ),
        (["task=bad.yaml"], "bad.yaml: while scanning for the next token found character "),
        (["task=sums_of_mine", "--data", "rows.jsonl"], "task=sums_of_mine: a task has its own rows; leave out --data"),
        (["task=sums", "task.dataset.generator=no.such"], "task=sums: ModuleNotFoundError: No module named 'no'"),
        (["task=sums_of_mine", "task.dataset.path=no.jsonl"], "no.jsonl: there is no such file"),
    ],
)
def test_a_task_without_rows_is_a_line(words: list[str], message: str, folder: Path) -> None:
    (folder / "bad.yaml").write_text("task:\n\tx: 1\n")
    done = command("rewards.check", "correctness", *words, cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"rewards.check: {message}")
