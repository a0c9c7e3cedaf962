"""Problems that are read while the run runs."""

import io
import json
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from datasets import Dataset, IterableDataset
from omegaconf import DictConfig
from transformers import AutoTokenizer

from grpo.config.check import check
from grpo.config.schema import ROOT
from grpo.data.task import load_task
from grpo.utils.errors import ConfigError
from grpo.view.stream import Stream

TOKENIZER = AutoTokenizer.from_pretrained(ROOT / "grpo" / "builtin" / "tiny")
ROWS = [{"question": f"Mia has {number} pens .", "answer": f"#### {number}"} for number in range(100)]
ROWS[30]["question"] = ROWS[3]["question"]  # which is held out
ROWS[31]["question"] = None
ROWS[32]["answer"] = "none"
ROWS[33]["question"] *= 20  # too long


@pytest.fixture
def local(tmp_path: Path) -> list[str]:
    """Overrides that point a task at a file, of which the first ten rows are held out."""
    write(tmp_path / "rows.jsonl", ROWS)
    options = ["task=jsonl", f"task.dataset.path={tmp_path}/rows.jsonl", "task.conversational=false"]
    return [*options, "task.answer.pattern='#### (.+)'", "task.max_prompt_length=40", "task.eval.size=10"]


STREAMED = ["task.dataset.streaming=true", "task.buffer_size=8"]


def write(file: Path, rows: list[Any]) -> None:
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


def numbers(size: int, rows: int = 20, seed: int | None = None, source: Any = None) -> Stream:
    """A stream of numbers, of which every seventh is filtered."""

    def prepare(some: Dataset, first: int) -> tuple[Dataset, dict[str, int]]:
        assert some["number"][0] == first
        kept = some.select([row for row, number in enumerate(some["number"]) if number % 7])
        return kept, {"rows": len(some), "used": len(kept)}

    every = IterableDataset.from_generator(source or (lambda: ({"number": number} for number in range(rows))))
    return Stream(every, prepare, size, seed, "numbers")


def taken(stream: Stream, first: int, last: int) -> list[int]:
    return [stream[number]["number"] for number in range(first, last)]


def test_a_stream_has_the_problems_of_the_whole_file(composed: Callable[..., DictConfig], local: list[str]) -> None:
    parts = ["task.split='train[10:]'", "task.eval.split='train[:10]'"]
    whole = load_task(composed(*local, *parts).task, TOKENIZER)
    problems = load_task(composed(*local, *STREAMED).task, TOKENIZER)
    assert problems.stream is not None
    assert str(problems).startswith("8 problems in the first 8 rows of a stream to train on\n10 problems held out")
    assert problems.held_out.to_list() == whole.held_out.to_list()
    rows = [problems.stream[number] for number in range(len(whole.train))]
    assert rows == whole.train.to_list()
    assert problems.counts == whole.counts
    assert problems.stream[len(rows)] == rows[0]  # it begins again
    assert problems.train.column_names == whole.train.column_names


def test_each_buffer_of_each_epoch_has_an_order_of_its_own() -> None:
    found, again, other = (taken(numbers(10, seed=seed), 0, 34) for seed in (1, 1, 2))
    plain = taken(numbers(10), 0, 34)
    assert found == again
    assert found != plain != other != found
    buffers = [slice(0, 8), slice(8, 17), slice(17, 25), slice(25, 34)]  # ten rows each
    assert [sorted(found[buffer]) for buffer in buffers] == [plain[buffer] for buffer in buffers]
    assert found[:17] != found[17:]


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("size", [1, 6, 50])
def test_a_stream_continues_at_any_number_with_the_same(seed: int | None, size: int) -> None:
    expected = taken(numbers(size, seed=seed), 0, 60)
    stream = numbers(size, seed=seed)
    for number in range(0, 50, 3):  # over several epochs
        stream.release(number)
        assert taken(stream, number, number + 5) == expected[number : number + 5]
        torch.save(stream.state_dict(), file := io.BytesIO())
        file.seek(0)
        resumed = numbers(size, seed=seed)
        resumed.load_state_dict(torch.load(file, weights_only=True))
        assert resumed.state_dict() == stream.state_dict()
        assert taken(resumed, number, number + 9) == expected[number : number + 9], number
        assert resumed.counts["rows"] >= stream.counts["rows"]
    with pytest.raises(IndexError, match="problem 0 has been released"):
        numbers(6)[0], stream[0]


def test_a_thread_reads_one_buffer_ahead_and_no_more() -> None:
    read: list[tuple[int, str]] = []
    ahead = threading.Semaphore(0)

    def source() -> Iterator[dict[str, int]]:
        for number in range(1000):
            read.append((number, threading.current_thread().name))
            if number % 10 == 9:
                ahead.release()
            yield {"number": number}

    stream = numbers(10, source=source)
    for buffers in range(2, 20):
        for _ in range(2 if buffers == 2 else 1):
            assert ahead.acquire(timeout=60)
        assert len(read) == 10 * buffers
        stream.release(number := stream._end)
        assert stream[number]["number"] == 10 * (buffers - 1) + (10 * (buffers - 1) % 7 == 0)
        assert len(stream._buffers) == 2
    assert {name.partition("_")[0] for _, name in read} == {"stream"}


@pytest.mark.parametrize(
    ("rows", "options", "says"),
    [
        ([], [], "there are no rows in it"),
        (ROWS[:10], [], "there are no rows behind the 10 that are held out; task.eval.size=0 trains on all"),
        (ROWS[:9], [], "there are no rows behind the 10 that are held out; task.eval.size=0 trains on all"),
        ([*ROWS[:10], *ROWS[31:34], ROWS[30]], [], "(rows 4, no_question 1, unread_answer 1, too_long 1, held_out 1)"),
        ([{"query": "?"}], [], "task: the data has no column"),
        (ROWS, ["task.prompt='{query}'"], "task: the data has no column query (task.prompt); it has: question, answer"),
        ([*ROWS, "garbage"], [], "JSON parse error: Invalid value. in row 100"),
        (ROWS, ["task.split=test"], "Bad split: test. Available splits: ['train']"),
    ],
)
def test_what_is_wrong_with_a_stream_is_one_line(
    composed: Callable[..., DictConfig],
    local: list[str],
    tmp_path: Path,
    rows: list[Any],
    options: list[str],
    says: str,
) -> None:
    write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(ConfigError) as caught:
        load_task(composed(*local, *STREAMED, *options).task, TOKENIZER)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_garbage_behind_good_rows_says_where_it_is() -> None:
    def source() -> Iterator[dict[str, int]]:
        yield from ({"number": number} for number in range(25))
        raise ValueError("no\nnumber")

    stream = numbers(10, source=source)
    assert len(taken(stream, 0, 17)) == 17
    with pytest.raises(ConfigError, match=r"^numbers: behind row 20: no number$"):
        stream[17]


def test_a_source_that_is_read_once_does_not_loop() -> None:
    once = iter([{"number": number} for number in range(20)])
    stream = numbers(10, source=lambda: once)
    assert len(taken(stream, 0, 17)) == 17
    with pytest.raises(ConfigError, match="there are no rows in it"):
        stream[17]


def test_a_column_that_is_missing_later_is_empty(
    composed: Callable[..., DictConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    from grpo.builtin.tasks import arithmetic

    def rows(**options: Any) -> Iterator[dict[str, Any]]:
        yield from ({"question": "2 + 3 ?", "answer": "5", "steps": number} for number in range(10))
        yield from ({"question": f"{number} + 3 ?", "more": 1} for number in range(10))
        yield {"question": "1 + 3 ?", "answer": "4"}

    monkeypatch.setattr(arithmetic, "rows", rows)
    options = ["task.dataset.streaming=true", "task.buffer_size=10", "task.eval.size=0"]
    stream = load_task(composed(*options).task).stream
    assert stream is not None
    assert stream[10] == {"question": "1 + 3 ?", "answer": "4", "steps": None, "prompt": "1 + 3 ?\n"}
    assert (stream.counts["rows"], stream.counts["no_answer"]) == (21, 10)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["train.max_steps=-1"], "a stream has no length; set train.max_steps"),
        (["rollout.prioritize=true"], "a stream has none twice"),
        (["train.ignore_data_skip=true"], "a stream resumes at its row"),
        (["task.split='train[10%:]'"], "task.split=train[10%:]: a stream has no slices"),
        (["task.eval.split='train[:10]'"], "task.eval.split=train[:10]: a stream has no slices"),
        (["task.buffer_size=0"], "task.buffer_size=0: rows of a stream"),
        (["task.dataset.streaming=often"], "task.dataset.streaming=often: true or false"),
    ],
)
def test_options_that_a_stream_excludes_are_one_line(
    composed: Callable[..., DictConfig], local: list[str], options: list[str], says: str
) -> None:
    check(composed(*local, *STREAMED, "train.max_steps=5"))
    with pytest.raises(ConfigError) as caught:
        check(composed(*local, *STREAMED, "train.max_steps=5", *options))
    assert says in str(caught.value)


def test_the_first_problems_are_those_of_the_first_epoch() -> None:
    assert list(numbers(6).beginning(5)["number"]) == [1, 2, 3, 4, 5]
    assert list(numbers(6).beginning(50)["number"]) == [number for number in range(20) if number % 7]
    assert [numbers(6).up_to(most) for most in (1, 17, 18)] == [1, 17, 17]
    assert list(islice(numbers(6, seed=1).beginning(3)["number"], 2)) != [1, 2]


@pytest.mark.long
@pytest.mark.slow
def test_a_million_rows_take_the_memory_of_a_few(composed: Callable[..., DictConfig], tmp_path: Path) -> None:
    with (tmp_path / "rows.jsonl").open("w") as file:
        file.writelines(f'{{"question": "Mia has {number} pens .", "answer": "{number}"}}\n' for number in range(10**6))
    options = ["task=jsonl", f"task.dataset.path={tmp_path}/rows.jsonl", "task.conversational=false"]
    stream = load_task(composed(*options, "task.dataset.streaming=true").task, TOKENIZER, seed=1).stream
    assert stream is not None
    memory, number, process = [], 0, psutil.Process()
    while stream.counts["rows"] < 999_800:  # without those that are held out
        stream.release(number)
        assert stream[number]["answer"]
        number += 500
        if number % 50_000 == 0:
            memory.append(process.memory_info().rss)
    assert number > 990_000
    assert max(memory) - memory[0] < 100 * 2**20, [size >> 20 for size in memory]
