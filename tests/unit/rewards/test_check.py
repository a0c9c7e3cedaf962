"""`python -m rewards.check` as its user sees it, and the completions that it tries."""

import json
import subprocess
import sys
from pathlib import Path

import pandas
import pytest

from rewards.check import fn_and_kwargs
from rewards.probing.probes import cheats, correct, final, incorrect
from rewards.probing.trial import above

MINE = """
import re

def contains(completions, answer, **columns):
    return [float(reference in text) for text, reference in zip(completions, answer)]

def length(completions):
    return [float(len(text)) for text in completions]

def nothing(completions):
    return [0.0] * len(completions)

def broken(completions):
    return [len(text) / (len(text) - len(text)) for text in completions]

def upper(completions, answer, **columns):
    return [float(a.isupper() and a.endswith("#### " + b)) for a, b in zip(completions, answer)]
"""


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("check") / "my_rewards.py"
    file.write_text(MINE)
    return file


def check(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rewards.check", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("name", ["correctness", "format", "xml_format", "brevity", "repetition", "overlong", "code"])
def test_the_built_in_rewards_withstand_what_policies_try(name: str) -> None:
    done = check(name, *(["sandbox=none"] if name == "code" else []))
    assert done.returncode == 0, done.stdout
    assert "nothing earned more than it should" in done.stdout
    for words in ("mean", "spread", "ms per completion", "many answers", "other scripts", "10,000 characters"):
        assert words in done.stdout


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (
            "contains",
            ["every number: earned more", "many answers: earned more", "correct, then incorrect: earned more"],
        ),
        ("length", ["10,000 characters: earned more than it should on 10 of 10 rows"]),
        ("nothing", ["it gave 0.00 to everything"]),
        ("broken", ["failed on every completion of 5 batches in a row: ZeroDivisionError: division by zero ("]),
    ],
)
def test_a_reward_that_can_be_cheated_fails_with_what_cheats_it(mine: Path, function: str, says: list[str]) -> None:
    done = check(f"{mine}:{function}")
    assert done.returncode == 1
    for words in says:
        assert words in done.stdout


def test_data_of_ones_own_is_tried_with_its_own_completions(mine: Path, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"question": "2 + 3?", "answer": "5", "completion": "IT IS 2 + 3\n#### 5"}) + "\n")
    assert check(f"{mine}:upper", "--data", data).returncode == 0
    assert check(f"{mine}:upper").returncode == 1  # in none of the customary forms


def test_the_format_of_gsm8k_is_data_too(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"question": "2 + 3?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"}) + "\n")
    assert check("correctness", "--data", data).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["corectness"], "reward.corectness.fn=corectness: write package.module.function"),
        (["correctness", "fnid=[hash]"], "kwargs.fnid: did you mean find?"),
        (["correctness", "find"], "find: write key=value"),
        (["correctness", "--data", "missing.jsonl"], "missing.jsonl"),
        (["correctness", "--run", "missing"], "missing: no completions in it"),
        (["code", "sandbox=none", "--data", "rewards/examples/problems.jsonl"], "needs a column tests"),
    ],
)
def test_what_is_asked_wrongly_is_one_line_and_status_2(arguments: list[str], says: str) -> None:
    done = check(*arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_changed_reward_is_compared_on_the_completions_of_a_run(tmp_path: Path) -> None:
    rows = {
        "step": [1, 1],
        "prompt": ["2 + 3?", "1 + 1?"],
        "completion": ["[red]it is 5", "#### 2"],
        "answer": ["5", "2"],
        "correctness": [1.0, 1.0],
        "advantage": [0.0, 0.0],
    }
    (tmp_path / "completions").mkdir()
    pandas.DataFrame(rows).to_parquet(tmp_path / "completions" / "completions_00001.parquet")
    done = check("correctness", "find=[hash]", "--run", tmp_path)
    assert done.returncode == 0
    assert "1 of 2 completions get another reward" in done.stdout
    assert "[red]it is 5" in done.stdout  # what a model wrote is no markup
    assert "choose one with --name" in check("format", "--run", tmp_path).stderr


def test_a_run_with_messages_is_compared_with_its_own_options(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Think."}, {"role": "user", "content": "2 + 3?"}]
    rows = {
        "step": [1, 1],
        "prompt": [messages, messages],
        "completion": [[{"role": "assistant", "content": text}] for text in ("so 5", "#### 5")],
        "answer": ["5", "5"],
        "correctness": [0.0, 1.0],
    }
    (tmp_path / "completions").mkdir()
    pandas.DataFrame(rows).to_parquet(tmp_path / "completions" / "completions_00001.parquet")
    (tmp_path / "resolved_config.yaml").write_text(
        "reward:\n  correctness:\n    fn: rewards.correctness.correctness\n    kwargs:\n      find: [hash]\n"
    )
    assert "0 of 2 completions get another reward" in check("correctness", "--run", tmp_path).stdout
    changed = check("correctness", "find=[hash,last_number]", "--run", tmp_path)
    assert "1 of 2 completions get another reward" in changed.stdout
    other = check("code", "sandbox=none", "--name", "correctness", "--run", tmp_path)
    assert "needs a column tests; the run has kept" in other.stderr


def test_probes_of_a_row_are_correct_incorrect_or_cheats() -> None:
    row = final({"question": "2 + 3?", "answer": "2 + 3 = 5\n#### 5"})
    assert (row["solution"], row["answer"]) == ("2 + 3 = 5", "5")
    assert correct(row)["boxed"].endswith(r"\boxed{5}")
    assert set(incorrect(row, "hash")) == {"off by one", "ten times", "sign changed"}
    assert all(not text.endswith("#### 5") for text in incorrect(row, "hash").values())
    assert len(cheats(row)["10,000 characters"]) == 10_000


def test_as_much_as_the_correct_answer_is_too_much_only_for_a_reward_of_correctness() -> None:
    assert above([1.0, 0.5, None], [1.0, 1.0, 1.0], discriminates=True) == [0]
    assert above([1.0, 1.5, 0.0], [1.0, 1.0, 1.0], discriminates=False) == [1]


def test_a_built_in_reward_is_checked_as_it_is_shipped() -> None:
    assert fn_and_kwargs("brevity", ["enough=7"]) == ("rewards.brevity.brevity", {"enough": 7, "limit": 512})
