"""Whatever a reward function does, the run gets one reward or None per completion, in time and in order."""

import asyncio
import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.isolation.reward import Reward, RewardError, split_by_prompt

MINE = """
import asyncio, os, re, signal, subprocess, sys, time
import numpy as np

def reward(completions, **columns):
    rewards = []
    for text in completions:
        if text == "raise":
            raise KeyError("level")
        if text == "hang":
            while True:
                pass
        if text == "sleep":
            time.sleep(100)
        if text == "hold the interpreter":
            re.match("(a+)+$", "a" * 50 + "b")
        if text == "die":
            os._exit(3)
        if text == "exit":
            raise SystemExit
        rewards.append({"nan": float("nan"), "inf": float("inf"), "1e39": 1e39, "-10**5000": -10**5000, "text": "0.5",
                        "list": [1.0], "none": None, "numpy": np.float32(0.5), "true": True,
                        "error": ValueError("bad row")}.get(text, 1.0))
    return rewards

def forks(completions, way="exits"):
    child = os.fork()
    if child == 0 and way == "exits":
        sys.exit(3)
    if child == 0 and way == "raises":
        raise ValueError("of the child")
    if child == 0:
        return [9.0] * len(completions)
    return [float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))] * len(completions)

def mapping(completions):
    return {row: 1.0 for row in range(len(completions))}

def huge(completions):
    return [10**400] * len(completions)

def logs_and_fails(completions, log_extra, **columns):
    if "raise" in completions:
        raise KeyError("level")
    log_extra("length", [len(text) for text in completions])
    return [1.0] * len(completions)

def array(completions):
    return np.arange(len(completions)) / 2

def one_short(completions):
    return [1.0] * (len(completions) - 1)

def only_alone(completions):
    return [1.0]

def number(completions):
    return 1.0

async def slow(completions, seconds=0.5):
    await asyncio.sleep(seconds)
    return [float(text) for text in completions]

def slow_rows(completions):
    time.sleep(0.2 * len(completions))
    return [float(text) for text in completions]

def logs(completions, log_extra, log_metric, trainer_state):
    log_extra("length", [len(text) for text in completions])
    log_metric("step", trainer_state.global_step)
    return [0.0] * len(completions)

def leaves(completions, file):
    orphan = "import os, time; os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0); time.sleep(600)"
    subprocess.run([sys.executable, "-c", orphan])
    import psutil

    def is_it(one):
        return orphan in (one.info["cmdline"] or ()) and os.getsid(one.pid) != os.getsid(0)

    orphans = []
    while not orphans:
        orphans = [one.pid for one in psutil.process_iter(["cmdline"]) if is_it(one)]
    with open(file, "w") as pids:
        print(os.getpid(), *orphans, file=pids)
    if "hang" in completions:
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
        time.sleep(600)
    if "die" in completions:
        os._exit(3)
    return [1.0] * len(completions)

def orphans(completions):
    for _ in completions:
        subprocess.run([sys.executable, "-c", "import os; os.fork() and os._exit(0)"])
    return [1.0] * len(completions)

def processes(completions):
    return [float(os.getpid())] * len(completions)

def of_group(completions, group_id):
    if "raise" in completions:
        raise KeyError("level")
    return [float(group_id.count(group)) for group in group_id]

def complete_groups(completions, prompts):
    return [float(prompts.count(prompt)) for prompt in prompts]
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rewards") / "mine.py"
    file.write_text(MINE)
    return file


@pytest.fixture(scope="module")
def mine(file: Path) -> Iterator[Reward]:
    reward = Reward(f"{file}:reward", "mine", timeout=1)
    yield reward
    reward.close()


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("raise", "KeyError"),
        ("exit", "SystemExit"),
        ("error", "ValueError"),
        ("nan", "NotFinite"),
        ("inf", "NotFinite"),
        ("1e39", "NotFinite"),
        ("-10**5000", "NotFinite"),
        ("text", "NotANumber"),
        ("list", "NotANumber"),
        ("die", "Died"),
        ("hang", "Timeout"),
        ("sleep", "Timeout"),
        ("hold the interpreter", "Timeout"),
    ],
)
def test_a_bad_completion_costs_itself_and_nothing_else(mine: Reward, text: str, kind: str) -> None:
    before = mine.errors[kind]
    started = time.monotonic()
    assert mine.score(completions=["a", text, "b"], answer=["1", "2", "3"]) == [1, None, 1]
    assert mine.errors[kind] == before + 1
    assert mine.faulted == [1], "the trainer skips these"
    assert time.monotonic() - started < 8


def test_none_skips_a_completion_and_is_no_error(mine: Reward) -> None:
    before = mine.errors.total()
    assert mine.score(completions=["none", "a", "numpy", "true"]) == [None, 1, 0.5, 1]
    assert mine.errors.total() == before
    assert mine.faulted == []


@pytest.mark.parametrize(("way", "status"), [("exits", 3), ("raises", 1), ("returns", 0)])
def test_a_child_that_a_reward_forks_answers_no_call(file: Path, way: str, status: int) -> None:
    reward = Reward(f"{file}:forks", "forks", kwargs={"way": way}, timeout=9)
    assert reward.score(completions=["a", "b"]) == [status] * 2
    assert reward.score(completions=["a"]) == [status]
    reward.close()


def test_arrays_are_rewards_too(file: Path) -> None:
    assert Reward(f"{file}:array", "array").score(completions=["a", "b", "c"]) == [0, 0.5, 1]


@pytest.mark.parametrize("function", ["one_short", "huge"])
def test_a_wrong_number_of_rewards_is_never_guessed_at(file: Path, function: str) -> None:
    reward = Reward(f"{file}:{function}", "mine")
    assert reward.score(completions=["a", "b", "c"]) == [None, None, None]
    assert reward.errors.total() == 3


@pytest.mark.parametrize("function", ["number", "mapping", "only_alone"])
def test_a_function_with_a_value_for_a_batch_stops_the_run(file: Path, function: str) -> None:
    reward = Reward(f"{file}:{function}", "mine")
    with pytest.raises(RewardError, match=r"reward.mine: returned .* for 2 completions; a list with a number, or None"):
        reward.score(completions=["a", "b"])


def test_a_function_that_was_right_before_is_called_one_by_one(file: Path) -> None:
    reward = Reward(f"{file}:only_alone", "mine")
    assert reward.score(completions=["a"]) == [1]
    assert reward.score(completions=["a", "b"]) == [1, 1]
    assert reward.errors == {"OneForAll": 1}


def test_a_function_that_always_hangs_is_given_up_after_three(file: Path) -> None:
    reward = Reward(f"{file}:reward", "mine", timeout=0.3)
    started = time.monotonic()
    assert reward.score(completions=["sleep"] * 50) == [None] * 50
    assert time.monotonic() - started < 10


def test_the_first_failure_of_each_kind_is_kept_with_traceback(
    file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    errors = tmp_path / "errors.jsonl"
    reward = Reward(f"{file}:reward", "mine", timeout=1, errors_file=errors)
    for _ in range(2):
        reward.score(completions=["a", "raise", "nan"], answer=["1", "2", "3"])
    kept = [json.loads(line) for line in errors.read_text().splitlines()]
    assert [one["kind"] for one in kept] == ["KeyError", "NotFinite"]
    assert kept[0]["row"] == {"completions": "raise", "answer": "2"}
    assert "mine.py" in kept[0]["traceback"]
    assert caplog.text.count("KeyError: 'level'") >= 1
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 2


def test_where_a_function_hung_is_in_its_traceback(file: Path, tmp_path: Path) -> None:
    errors = tmp_path / "errors.jsonl"
    Reward(f"{file}:reward", "mine", timeout=0.5, errors_file=errors).score(completions=["sleep"])
    assert "line 14 in reward" in json.loads(errors.read_text())["traceback"]


def test_raise_ends_the_run_with_the_completion_saved(file: Path, tmp_path: Path) -> None:
    reward = Reward(f"{file}:reward", "mine", on_error="raise", errors_file=tmp_path / "errors.jsonl")
    with pytest.raises(RewardError, match=r"reward\.mine: KeyError: 'level' .*; the completion is in .*errors\.jsonl"):
        reward.score(completions=["a", "raise"])
    assert json.loads((tmp_path / "errors.jsonl").read_text())["row"] == {"completions": "raise"}


def test_slow_rewards_run_at_the_same_time(file: Path) -> None:
    functions = [Reward(f"{file}:slow", f"slow{number}").as_function() for number in range(3)]

    async def together() -> list[list[float | None]]:
        return await asyncio.gather(*(function(completions=["1", "2"]) for function in functions))

    started = time.monotonic()
    assert asyncio.run(together()) == [[1, 2]] * 3
    assert time.monotonic() - started < 1.2  # one after the other they take 1.5 s


def test_workers_share_the_completions_and_keep_their_order(file: Path) -> None:
    reward = Reward(f"{file}:slow_rows", "mine", workers=4)
    started = time.monotonic()
    assert reward.score(completions=[str(number) for number in range(8)]) == list(range(8))
    assert time.monotonic() - started < 1.2  # one process takes 1.6 s


def test_workers_see_complete_groups(file: Path) -> None:
    reward = Reward(f"{file}:complete_groups", "mine", workers=3)
    prompts = ["a"] * 4 + ["b"] * 2 + ["c"] * 4
    assert reward.score(completions=["x"] * 10, prompts=prompts) == [4] * 4 + [2] * 2 + [4] * 4


@pytest.mark.parametrize("workers", [1, 2])
def test_a_reward_that_compares_gets_whole_groups(file: Path, workers: int) -> None:
    reward = Reward(f"{file}:of_group", "mine", workers=workers)
    groups = [0] * 4 + [1] * 2 + [2] * 4
    same = {"prompts": ["a"] * 10, "group_id": groups}
    assert reward.score(completions=["x"] * 10, **same) == [4] * 4 + [2] * 2 + [4] * 4
    failing = ["x"] * 5 + ["raise"] + ["x"] * 4
    assert reward.score(completions=failing, **same) == [4] * 4 + [None] * 2 + [4] * 4
    assert reward.errors == {"KeyError": 2}
    assert reward.faulted == [4, 5]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=12), st.integers(1, 5))
def test_parts_are_all_completions_in_order_and_divide_no_group(sizes: list[int], count: int) -> None:
    prompts = [str(group) for group, size in enumerate(sizes) for _ in range(size)]
    parts = split_by_prompt(prompts, count)
    assert [row for part in parts for row in part] == list(range(len(prompts)))
    assert 1 <= len(parts) <= count
    assert all(prompts[part[0] - 1] != prompts[part[0]] for part in parts if part[0])


def test_what_trl_offers_a_reward_arrives_and_its_logs_return(file: Path) -> None:
    logged: list[Any] = []
    state = SimpleNamespace(global_step=7, log_history=[object()])
    reward = Reward(f"{file}:logs", "mine").as_function()
    arguments = {"log_extra": lambda *call: logged.append(call), "log_metric": lambda *call: logged.append(call)}
    assert asyncio.run(reward(completions=["a", "bc"], trainer_state=state, environments=object(), **arguments)) == [
        0,
        0,
    ]
    assert logged == [("length", [1, 2]), ("step", 7.0), ("rewards/mine/errors", 0.0)]
    logged.clear()
    asyncio.run(reward(completions=["a"], length=[9], trainer_state=state, **arguments))
    assert "length" not in dict(logged), "the trainer logs the columns of the data"


def test_logged_values_have_a_place_for_completions_that_failed(file: Path) -> None:
    logged: list[Any] = []
    reward = Reward(f"{file}:logs_and_fails", "mine")
    reward.score(completions=["a", "raise", "bcd"], log_extra=lambda *call: logged.append(call))
    assert [value for column, values in logged for value in values] == [1, None, 3]


def test_a_worker_that_logs_nothing_leaves_places_empty(file: Path) -> None:
    logged: list[Any] = []
    reward = Reward(f"{file}:logs_and_fails", "mine", workers=3)
    completions = ["raise", "a", "raise", "raise"]
    reward.score(prompts=[1, 2, 3, 3], completions=completions, log_extra=lambda *call: logged.append(call))
    assert logged == [("length", [None, 1, None, None])]


def test_a_reward_that_never_works_ends_the_run_after_5_batches(file: Path) -> None:
    reward = Reward(f"{file}:reward", "mine")
    for _ in range(4):
        assert reward.score(completions=["raise", "raise"]) == [None, None]
    with pytest.raises(RewardError, match=r"failed on every completion of 5 batches in a row: KeyError: 'level'"):
        reward.score(completions=["raise", "raise"])


def test_a_file_that_was_changed_is_not_mixed_with_what_it_was(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import os\ndef f(completions):\n    os._exit(1)\n")
    reward = Reward(f"{tmp_path}/mine.py:f", "mine")
    (tmp_path / "mine.py").write_text("def f(completions):\n    return [1.0] * len(completions)\n")
    with pytest.raises(RewardError, match=r"mine\.py has been changed since the run began"):
        reward.score(completions=["a", "b"])


def test_trl_takes_it_for_an_async_reward_with_its_name(mine: Reward) -> None:
    from trl.trainer.utils import is_async_callable

    assert is_async_callable(mine.as_function())
    assert mine.as_function().__name__ == "mine"


def test_what_the_function_needs_is_known_before_it_is_called(file: Path) -> None:
    assert Reward("rewards.correctness.correctness", "correctness").needs == ["completions", "answer"]
    assert Reward("rewards.brevity.brevity", "brevity").needs == ["completions", "completion_ids"]
    assert Reward("rewards.code.code", "code", {"sandbox": "none"}).needs == ["completions", "tests"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import not_there", r"reward\.mine\.fn=.*No module named 'not_there' .*mine\.py, line 1"),
        ("import os; os._exit(1)", r"reward\.mine\.fn=.*: its process ended while it was imported"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_explained(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ValueError, match=says):
        Reward(f"{tmp_path}/mine.py:f", "mine")


def test_closing_ends_the_processes(file: Path) -> None:
    reward = Reward(f"{file}:processes", "mine", workers=2)
    (first, _) = reward.score(completions=["a", "b"])
    reward.close()
    assert first is not None
    assert not Path(f"/proc/{first:.0f}").exists()


@pytest.mark.parametrize("way", ["close", "die", "hang", "the trainer is killed"])
def test_what_a_function_started_ends_with_it_and_the_trainer(file: Path, tmp_path: Path, way: str) -> None:
    pids = tmp_path / "pids"
    kwargs = {"file": str(pids)}
    if way == "the trainer is killed":
        trainer = f"""from rewards.isolation.reward import Reward
Reward("{file}:leaves", "mine", {kwargs}).score(completions=["hang"])"""
        process = subprocess.Popen([sys.executable, "-c", trainer])
        assert comes_true(lambda: pids.exists() and pids.read_text().endswith("\n"), 60)
        process.kill()
        process.wait()
    else:
        reward = Reward(f"{file}:leaves", "mine", kwargs, timeout=3)
        assert reward.score(completions=[way]) == [1.0 if way == "close" else None]
        reward.close()
    left = [int(pid) for pid in pids.read_text().split()]
    assert len(left) == 2
    limit = 10 if way == "the trainer is killed" else 0
    assert comes_true(lambda: not any(psutil.pid_exists(pid) for pid in left), limit)


def test_orphans_are_reaped_while_the_function_goes_on(file: Path) -> None:
    reward = Reward(f"{file}:orphans", "mine")
    reward.score(completions=["a"] * 20)
    supervisor = psutil.Process(reward._workers[0].process.pid)
    assert comes_true(lambda: len(supervisor.children(recursive=True)) == 1, 10)
    reward.close()


def comes_true(condition: Callable[[], bool], seconds: float) -> bool:
    """Return whether a condition holds within some seconds."""
    until = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < until:
        time.sleep(0.05)
    return holds


def test_completions_of_other_tasks_get_none_and_no_call(file: Path) -> None:
    logged: list[Any] = []
    reward = Reward(f"{file}:logs_and_fails", "mine")
    function = reward.as_function(["a"])
    completions, tasks = ["no", "x", "raise", "no"], ["b", "a", "a", "b"]

    def call(tasks: list[str]) -> list[float | None]:
        given = {"completions": completions, "task": tasks, "log_extra": lambda *call: logged.append(call)}
        return asyncio.run(function(**given))

    assert call(tasks) == [None, 1, None, None]
    assert logged == [("length", [None, 1, None, None])]
    assert (reward.faulted, reward.scored, reward.errors.total()) == ([2], 1, 1)
    for _ in range(6):  # more than a reward may fail on in a row
        assert call(["b"] * 4) == [None] * 4
    assert (reward.faulted, reward.scored) == ([], 1)
