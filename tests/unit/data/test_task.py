import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path

import pandas
import pytest
from omegaconf import DictConfig
from transformers import AutoTokenizer

from grpo.builtin.tasks import arithmetic
from grpo.config.schema import ROOT
from grpo.data.task import load_task, prompt_lengths
from grpo.utils.errors import ConfigError

ROWS = [
    {"question": "2 + 3?", "answer": "First.\n#### 5", "level": 1},
    {"question": "1,000?", "answer": "#### 1,000", "level": 2},
    {"question": "{braces}?", "answer": "#### 7", "level": 3},
    {"question": "unanswered", "answer": "nothing", "level": 4},
]


@pytest.fixture
def local(tmp_path: Path) -> list[str]:
    """Overrides that point `task=gsm8k` at a file."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return [
        "task=gsm8k",
        f"task.dataset.path={file}",
        "task.eval.split='train[:1]'",
    ]


def test_the_embedded_task_has_prompts_and_answers(composed: Callable[..., DictConfig]) -> None:
    problems = load_task(composed("task.dataset.size=20", "task.eval.size=10").task)
    assert (len(problems.train), len(problems.held_out)) == (20, 10)
    assert problems.train[0]["prompt"] == problems.train[0]["question"] + "\n"
    assert not set(problems.train["question"]) & set(problems.held_out["question"])
    assert str(problems) == "20 problems to train on\n10 problems held out"


def test_a_local_file_in_the_format_of_gsm8k_is_read(composed: Callable[..., DictConfig], local: list[str]) -> None:
    task = composed(*local, "task.eval.split='train[1:2]'").task
    problems = load_task(task)
    train, held_out = problems.train, problems.held_out
    assert list(train["answer"]) == ["5", "7"]  # without what has no answer and what is held out
    assert list(train["level"]) == [1, 3]  # rewards get every column
    counts = {"no_question": 0}
    counts |= {
        "rows": 4,
        "used": 2,
        "no_answer": 0,
        "unread_answer": 1,
        "too_long": 0,
        "held_out": 1,
        "not_a_number": 0,
    }
    assert problems.counts["train"] == counts
    assert train[0]["prompt"] == [
        {"role": "system", "content": task.system_prompt},
        {"role": "user", "content": "2 + 3?"},
    ]
    assert train[1]["prompt"][1]["content"] == "{braces}?"
    assert list(held_out["answer"]) == ["1,000"]


def test_a_plain_prompt_begins_with_the_system_prompt(composed: Callable[..., DictConfig], local: list[str]) -> None:
    task = composed(*local, "task.conversational=false").task
    assert load_task(task).train[0]["prompt"] == f"{task.system_prompt}\n\n1,000?"


def test_a_column_of_messages_is_the_prompt(composed: Callable[..., DictConfig], tmp_path: Path) -> None:
    asked = [{"role": role, "content": text} for role, text in (("user", "1"), ("assistant", "one"), ("user", "2"))]
    rows = [{"prompt": asked, "answer": "two"}, {"prompt": asked[2:], "answer": "two"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = ["task=jsonl", f"task.dataset.path={tmp_path / 'rows.jsonl'}", "task.split=train", "task.eval.size=0"]
    line += ["task.prompt=prompt", "task.system_prompt=Count."]
    system = {"role": "system", "content": "Count."}
    assert load_task(composed(*line).task).train["prompt"][:] == [[system, *asked], [system, asked[2]]]
    with pytest.raises(ConfigError, match="a column of messages, which needs"):
        load_task(composed(*line, "task.conversational=false").task)


def test_the_name_of_a_column_alone_is_the_prompt(composed: Callable[..., DictConfig], local: list[str]) -> None:
    tasks = [composed(*local, f"task.prompt={prompt}").task for prompt in ("question", "'{question}'")]
    named, braces = (load_task(task).train for task in tasks)
    assert list(named["prompt"]) == list(braces["prompt"])
    shots = [
        composed("task=sums", "task.dataset.size=4", f"task.prompt={name}").task for name in ("question", "answer")
    ]
    asked = [load_task(task).train[0]["prompt"] for task in shots]
    assert asked[0].endswith(load_task(shots[0]).train[0]["question"])
    assert asked[1] != asked[0]


def test_without_evaluation_no_split_is_held_out(composed: Callable[..., DictConfig], local: list[str]) -> None:
    assert load_task(composed(*local, "task.eval.size=0", "task.eval.split=nothing").task).held_out is None


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("task.dataset.path=missing.jsonl", "there is no file"),
        ("task.dataset.path=rows.txt", "rows.txt"),
        ("task.dataset.path=null", "name your file: task.dataset.path=my_problems.jsonl"),
        ("task.split=test", 'Unknown split "test"'),
        ("task.prompt='{query}'", "no column query (task.prompt); it has: question, answer, level"),
        ("task.prompt=questions", "task.prompt='questions': it names no column"),
        ("task.prompt='{{question}}'", "it names no column, so that all rows have the same prompt"),
        ("task.answer.column=answers.text", "no column answers"),
        ("task.answer.column=solution", "no column solution"),
        ("task.answer.pattern='=> (.*)'", "rows whose answer task.answer.pattern does not find"),
        ("task.answer.pattern='=> (.*'", "missing ), unterminated"),
        ("task.answer.pattern='=> .*'", "in parentheses"),
        ("task.prompt='{question'", "task.prompt or task.answer.pattern: expected '}'"),
        ("task.eval.split=test", "Parts of one split are \"task.split='train[200:]'\""),
        ("task.few_shot.examples=[{answer: 5}]", "{'answer': 5} lacks 'question', which task.prompt names"),
        ("task.split='train[:0]'", "no data"),
    ],
)
def test_what_is_wrong_with_the_data_is_one_line(
    composed: Callable[..., DictConfig], local: list[str], override: str, says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_task(composed(*local, override).task)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_held_out_problems_are_generated_as_many_as_wanted(
    composed: Callable[..., DictConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def rows(split: str, size: int, seed: int) -> list[dict[str, str | int]]:
        asked.append((split, size))
        return arithmetic_rows(split, size, seed)

    arithmetic_rows = arithmetic.rows
    monkeypatch.setattr(arithmetic, "rows", rows)
    problems = load_task(composed("task.dataset.size=64", "task.eval.size=8").task)
    assert asked == [("train", 64), ("test", 8)]
    assert (len(problems.train), len(problems.held_out or [])) == (64, 8)


def test_a_generator_of_no_rows_is_one_line(composed: Callable[..., DictConfig]) -> None:
    with pytest.raises(ConfigError, match="there are no rows in it"):
        load_task(composed("task.dataset.size=0").task)


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_a_users_file_is_read_whatever_its_kind_and_columns(
    composed: Callable[..., DictConfig], tmp_path: Path, kind: str
) -> None:
    table = pandas.DataFrame({"problem": [f"{number} + 1?" for number in range(20)], "result": range(1, 21)})
    file = tmp_path / f"rows.{kind}"
    {"jsonl": lambda: table.to_json(file, orient="records", lines=True), "csv": lambda: table.to_csv(file, index=False),
     "parquet": lambda: table.to_parquet(file)}[kind]()  # fmt: skip
    columns = ["task.prompt='{problem}'", "task.answer.column=result"]
    problems = load_task(composed("task=jsonl", f"task.dataset.path={file}", *columns).task)
    assert (len(problems.train), len(problems.held_out)) == (18, 2)
    assert problems.train[0]["answer"] == "3"
    assert problems.train[0]["prompt"] == [{"role": "user", "content": "2 + 1?"}]
    split = [f"task.dataset.data_files={{train: {file}, test: {file}}}"]
    with pytest.raises(ConfigError, match="nothing left of train: 20 of 20 rows that are among the held-out ones"):
        load_task(composed("task=jsonl", *split, *columns, "task.split=train", "task.eval.split=test").task)


def test_rows_without_a_numeric_answer_are_counted(composed: Callable[..., DictConfig], tmp_path: Path) -> None:
    rows = [{"question": f"{a}?", "answer": a} for a in ("5", "", None, "Paris", "  ")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems = load_task(composed("task=jsonl", f"task.dataset.path={tmp_path}/rows.jsonl", "task.eval.size=0",
                                  "task.split=train").task)  # fmt: skip
    assert list(problems.train["answer"]) == ["5", "Paris"]
    assert str(problems) == "2 problems to train on (filtered: 3 without an answer); 1 answers are not numbers"


def test_prompts_over_the_limit_are_filtered_in_both_splits(
    composed: Callable[..., DictConfig],
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "grpo" / "builtin" / "tiny")
    task = composed("task.dataset.size=50", "task.eval.size=50", "task.max_prompt_length=30").task
    everything, problems = load_task(task), load_task(task, tokenizer)
    for split in ("train", "held_out"):
        lengths = prompt_lengths(list(getattr(everything, split)["prompt"]), tokenizer)
        longer = sum(length > 30 for length in lengths)
        assert 0 < longer < len(lengths)
        counts = problems.counts[split]
        assert (counts["too_long"], len(getattr(problems, split))) == (longer, len(lengths) - longer)
        assert max(prompt_lengths(list(getattr(problems, split)["prompt"]), tokenizer)) <= 30


def test_the_chat_template_counts_and_is_needed(composed: Callable[..., DictConfig]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "grpo" / "builtin" / "tiny")
    conversation = [[{"role": "user", "content": "Mia has 3 pens ."}]]
    text = tokenizer.apply_chat_template(conversation[0], add_generation_prompt=True, tokenize=False)
    assert prompt_lengths(conversation, tokenizer) == [len(tokenizer(text, add_special_tokens=False)["input_ids"])]
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="has no chat template"):
        prompt_lengths(conversation, tokenizer)
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(ConfigError, match=r"refuses .* System role not supported; try task\.system_prompt=null"):
        prompt_lengths(conversation, tokenizer)


def test_examples_stand_before_the_question(composed: Callable[..., DictConfig], local: list[str]) -> None:
    shots = ["task.few_shot.examples=[{question: '1 + 1?', answer: 2}]", "task.few_shot.completion='#### {answer}'"]
    contents = [message["content"] for message in load_task(composed(*local, *shots).task).train[0]["prompt"]]
    assert contents[1:] == ["1 + 1?", "#### 2", "1,000?"]
    plain = load_task(composed(*local, *shots, "task.conversational=false", "task.system_prompt=null").task)
    assert plain.train[0]["prompt"] == "1 + 1?#### 21,000?"


def test_the_sums_have_their_example_on_a_line_of_its_own(composed: Callable[..., DictConfig]) -> None:
    prompt = load_task(composed("task=sums").task).train[0]["prompt"]
    assert prompt.startswith("59 + 63 = 122\n")
    assert prompt.endswith(" =")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gsm_symbolic", "chain_sum"])
def test_reasoning_gym_scores_its_problems_by_its_verifier(composed: Callable[..., DictConfig], name: str) -> None:
    pytest.importorskip("reasoning_gym")
    from rewards.reasoning_gym import reasoning_gym

    config = composed("task=reasoning_gym", f"task.dataset.name={name}", "task.dataset.size=30", "task.eval.size=10")
    assert list(config.reward) == ["reasoning_gym"]
    problems = load_task(config.task)
    assert not set(problems.train["question"]) & set(problems.held_out["question"])
    rows = {column: list(problems.train[column]) for column in problems.train.column_names}
    answers = rows["answer"]
    right = [f"<answer>{answer}</answer>" for answer in answers]
    assert reasoning_gym(completions=right, **rows) == [1.0] * len(answers)
    assert max(reasoning_gym(completions=["<answer>no</answer>"] * len(answers), **rows)) < 1
    assert reasoning_gym(completions=[""] * len(answers), **rows) == [0.0] * len(answers)


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_answers_that_are_numbers_in_the_file_are_answers(
    composed: Callable[..., DictConfig], tmp_path: Path, kind: str
) -> None:
    rows = pandas.DataFrame([{"question": f"{number} + 1?", "answer": number + 1} for number in range(4)])
    file = tmp_path / f"rows.{kind}"
    rows.to_json(file, orient="records", lines=True) if kind == "jsonl" else rows.to_csv(file, index=False)
    task = composed("task=jsonl", f"task.dataset.path={file}", "task.eval.size=0").task
    assert list(load_task(task).train["answer"]) == ["1", "2", "3", "4"]


def test_a_row_without_a_question_is_filtered_and_counted(composed: Callable[..., DictConfig], tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"question": question, "answer": "2"} for question in ("1 + 1?", None, "", "  ")]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems = load_task(composed("task=jsonl", f"task.dataset.path={file}", "task.eval.size=0").task)
    assert list(problems.train["answer"]) == ["2"]
    assert "None" not in str(list(problems.train["prompt"]))
    assert str(problems) == "1 problems to train on (filtered: 3 without a value that task.prompt names)"


def test_columns_that_trl_takes_for_images_are_one_line(composed: Callable[..., DictConfig], tmp_path: Path) -> None:
    for name in ("image", "images"):
        file = tmp_path / f"{name}.jsonl"
        file.write_text(json.dumps({"question": "1 + 1?", "answer": "2", name: "x"}) + "\n")
        with pytest.raises(ConfigError, match=f"a column that is named {name} .* set task.images, or rename it"):
            load_task(composed("task=jsonl", f"task.dataset.path={file}", "task.eval.size=0").task)


@pytest.mark.parametrize("name", ["completions", "self", "prompts"])
def test_a_column_named_like_an_argument_of_rewards_is_one_line(
    composed: Callable[..., DictConfig], tmp_path: Path, name: str
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"question": "1 + 1?", "answer": "2", name: "x"}) + "\n")
    with pytest.raises(ConfigError, match=f"^task: a column is named {name}, as an argument of reward functions is"):
        load_task(composed("task=jsonl", f"task.dataset.path={file}", "task.eval.size=0").task)


def test_a_file_that_is_not_utf_8_is_one_line(composed: Callable[..., DictConfig], tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"question": "caf\xe9?", "answer": "2"}\n')
    with pytest.raises(ConfigError) as caught:
        load_task(composed("task=jsonl", f"task.dataset.path={file}", "task.eval.size=0").task)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"task.dataset={{path: {file}")


SEPARATED = '{"question": "a \u2028 b", "answer": "2"}\n'.encode()  # no end of a line in JSON
GOOD = b'{"question": "1 + 1?", "answer": "2"}\n'
PARQUET = io.BytesIO()
pandas.DataFrame([{"question": "1 + 1?", "answer": "2"}]).to_parquet(PARQUET)
MALFORMED: dict[str, tuple[bytes, str | int]] = {  # what is said of it, or how many problems are in it
    "empty.jsonl": (b"", "there are no rows in it"),
    "blank.jsonl": (b"\n\n", "no data"),
    "cut.jsonl": (GOOD + b'{"question": "1', "Missing a closing quotation mark"),
    "array.jsonl": (b"[" + GOOD.strip() + b"]", 1),
    "number.jsonl": (GOOD + b"5\n", "number.jsonl"),  # and what is wrong, in words of each version of datasets
    "lists.jsonl": (b"[1, 2]\n", "the data has no column answer"),
    "byte_order_mark.jsonl": (b"\xef\xbb\xbf" + GOOD, 1),
    "utf_16.jsonl": (GOOD.decode().encode("utf-16"), "JSON parse error"),
    "null_byte.jsonl": (GOOD.replace(b"1 + 1", b"1 \0 1"), "JSON parse error"),
    "binary.jsonl": (bytes(range(256)), "JSON parse error"),
    "surrogate.jsonl": (GOOD.replace(b"1 + 1", rb"\ud800"), "surrogate"),
    "twice.jsonl": (b'{"question": "a", "question": "b", "answer": "2"}\n', "specified twice"),
    "numbers_and_text.jsonl": (GOOD + GOOD.replace(b'"2"', b"2"), 2),
    "missing.jsonl": (GOOD + b'{"answer": "3"}\n{"question": "1?"}\n', 1),
    "null.jsonl": (b'{"question": null, "answer": "3"}\n', "1 of 1 rows without a value that task.prompt names"),
    "not_a_number.jsonl": (GOOD.replace(b'"2"', b"NaN"), "1 of 1 rows without an answer"),
    "ragged.csv": (b"question,answer\na,1\nb,2,3,4\n", "Expected 2 fields in line 3, saw 4"),
    "short.csv": (b"question,answer\na,1\nb\n", 1),
    "empty.csv": (b"", "No columns to parse from file"),
    "header.csv": (b"question,answer\n", "no data"),
    "quote.csv": (b'question,answer\n"a,1\nb,2\n', "EOF inside string"),
    "no_header.csv": (
        b"1 + 1?,2\n1 + 2?,3\n",
        "the data has no column answer (task.answer.column), question (task.prompt); it has: 1 + 1?, 2",
    ),
    "latin.csv": (b"question,answer\ncaf\xe9,1\n", "'utf-8' codec can't decode"),
    "semicolon.csv": (
        b"question;answer\na;1\n",
        "the data has no column answer (task.answer.column), question (task.prompt); it has: question;answer",
    ),
    "compressed.jsonl.gz": (gzip.compress(GOOD), 1),
    "UPPER.JSONL": (GOOD, 1),
    "lines.ndjson": (GOOD, 1),
    "tabs.tsv": (b"question\tanswer\na, b\t1\n", 1),
    "sheet.xlsx": (b"PK", "sheet.xlsx: of files only these are read: .jsonl, .json, .ndjson, .csv, .tsv, .parquet"),
    "without_suffix": (GOOD, "without_suffix: of files only these are read"),
    "cut.parquet": (PARQUET.getvalue()[:-20], "Either the file is corrupted"),
    "text.parquet": (b"hello", "smaller than the minimum"),
    "damaged.parquet": (PARQUET.getvalue()[:100] + bytes(6) + PARQUET.getvalue()[106:], "Couldn't deserialize"),
    "text.json": (b"hello", "JSON parse error"),
    "second_line.jsonl": (
        SEPARATED + b"{'question': 'a'}\n",
        "second_line.jsonl, line 2: \"{'question': 'a'}\")",
    ),
}


OF_STREAMS = {
    "second_line.jsonl, line 2: \"{'question': 'a'}\")": "JSON parse error: Missing a name for object member",
    "no data": "there are no rows in it",
    "1 of 1 rows without a value that task.prompt names": "none of its rows can be trained on (rows 1, no_question 1)",
    "1 of 1 rows without an answer": "none of its rows can be trained on (rows 1, no_answer 1)",
}
"""What is said of a stream instead."""


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_file_is_read_in_part_or_fails_with_one_line(
    composed: Callable[..., DictConfig], tmp_path: Path, name: str, streaming: bool
) -> None:
    content, expected = MALFORMED[name]
    file = tmp_path / name
    file.write_bytes(content)
    options = ["task.split=train", "task.eval.size=0", f"task.dataset.streaming={streaming}"]
    task = composed("task=jsonl", f"task.dataset.path={file}", *options).task
    if isinstance(expected, int):
        problems = load_task(task)
        assert (problems.stream.up_to(99) if problems.stream else len(problems.train)) == expected
        return
    if streaming:
        expected = OF_STREAMS.get(expected, expected)
    with pytest.raises(ConfigError) as caught:
        load_task(task)
    assert expected in str(caught.value)
    assert str(caught.value).isprintable(), "on a terminal"
    assert str(caught.value).startswith("task")
