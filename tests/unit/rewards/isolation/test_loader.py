from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from rewards.isolation.loader import bind, load, needs

MINE = """
def brevity(completions, limit=10, **columns):
    return [float(len(text) <= limit) for text in completions]

def strict(completions, answer, limit=3):
    return [0.0 for _ in completions]
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    return file


def test_a_reward_loads_from_a_file_and_takes_its_kwargs(mine: Path) -> None:
    reward = bind(load(f"{mine}:brevity", "short"), "short", {"limit": 3})
    assert reward(completions=["abc", "abcd"], answer=["1", "2"]) == [1, 0]


def test_a_function_without_further_columns_gets_what_it_names(mine: Path) -> None:
    function = load(f"{mine}:strict", "strict")
    assert bind(function, "strict", {})(completions=["a"], answer=["1"], log_metric=print) == [0]
    assert needs(function, {}) == ["completions", "answer"]
    assert needs(load(f"{mine}:brevity", "short"), {}) == ["completions"]


@pytest.mark.parametrize("fn", ["rewards.correctness.correctness", "rewards.correctness:correctness"])
def test_a_reward_loads_from_a_module(fn: str) -> None:
    assert load(fn, "correctness")(completions=["5"], answer=["5"]) == [1]


def test_a_reward_loads_from_an_entry_point_of_a_package(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("short", "rewards.brevity:brevity", "grpo.rewards")
    monkeypatch.setattr("rewards.isolation.loader.entry_points", lambda group, name: [entry] if name == "short" else [])
    assert load("short", "mine").__module__ == "rewards.brevity"


def test_a_file_can_import_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "lying_beside.py").write_text("LIMIT = 7\n")
    (tmp_path / "mine.py").write_text("from lying_beside import LIMIT\ndef f(completions): return [LIMIT]\n")
    assert load(f"{tmp_path}/mine.py:f", "mine")(completions=["a"]) == [7]


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        ("brevity", "write package.module.function, path/to/file.py:function"),
        ("missing.py:f", "there is no file"),
        ("rewards/correctness.py", "path/to/file.py:function"),
        ("rewards.nothing.f", "No module named 'rewards.nothing'"),
        ("rewards.correctness.correct", "it has: correctness"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_explained(fn: str, says: str) -> None:
    with pytest.raises(ValueError, match=r"reward\.mine\.fn=") as caught:
        load(fn, f"reward.mine.fn={fn}")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1\ndef f(completions)\n    return 1\n", r"SyntaxError: expected ':' \(.*mine.py, line 2\)"),
        ("x = 1\nimport not_there\n", r"ModuleNotFoundError: No module named 'not_there' .*mine.py, line 2"),
        ("import sys\n\nsys.exit('enough')\n", r"SystemExit: enough .*mine.py, line 3"),
    ],
)
def test_a_file_that_breaks_on_import_is_named_with_the_line(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(text)
    with pytest.raises(ValueError, match=says):
        load(f"{file}:f", "mine")


def test_an_unknown_argument_is_named_with_the_possible_ones() -> None:
    function = load("rewards.brevity.brevity", "mine")
    with pytest.raises(ValueError, match=r"reward\.mine\.kwargs: .*'limt'; it takes: enough, limit"):
        bind(strictly(function), "mine", {"limt": 3})
    with pytest.raises(ValueError, match=r"reward\.mine\.kwargs\.limt: did you mean limit\?"):
        bind(function, "mine", {"limt": 3})


def strictly(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function without `**columns`, which would take any argument."""

    def brevity(completions: Any, enough: int = 1, limit: int = 2) -> Any:
        return function(completions, enough=enough, limit=limit)

    return brevity
