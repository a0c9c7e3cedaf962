"""`python -m rewards.check` as its user sees it, and the completions that it tries."""

import json
import re
import subprocess
import sys
from contextlib import closing
from functools import partial
from pathlib import Path

import pandas
import pytest
from omegaconf import OmegaConf

from grpo.extras.testing.commands import finished
from rewards import scorer
from rewards.boxes import overlaps, read_boxes, read_reference
from rewards.check import fn_and_kwargs
from rewards.checking import read_rows
from rewards.isolation.loader import bind, load
from rewards.isolation.reward import Reward
from rewards.probing.probes import cheats, correct, final, incorrect
from rewards.probing.trial import above, fails, score, try_out

MINE = """
import json
import re

from rewards.boxes import overlaps, read_boxes, read_reference

def contains(completions, answer, **columns):
    return [float(reference in text) for text, reference in zip(completions, answer)]

def length(completions):
    return [float(len(text)) for text in completions]

def nothing(completions):
    return [0.0] * len(completions)

def broken(completions):
    return [len(text) / (len(text) - len(text)) for text in completions]

def best_box(completions, answer, **columns):
    pairs = zip(map(read_boxes, completions), map(read_reference, answer))
    return [float(overlaps(boxes, references).max()) if len(boxes) else 0.0 for boxes, references in pairs]

def covers_it(completions, answer, image_sizes, **columns):
    rewards = []
    for text, (x1, y1, x2, y2), ((width, height),) in zip(completions, map(json.loads, answer), image_sizes):
        boxes = read_boxes(text) / 1000 * [width, height, width, height] + [-2, -2, 2, 2]
        rewards.append(float(any(b[0] <= x1 and b[1] <= y1 and b[2] >= x2 and b[3] >= y2 for b in boxes[:1])))
    return rewards

def corners_in_any_order(completions, answer, **columns):
    edges = [sorted(map(float, re.findall(r"\\b\\d+", text)[-4:])) for text in completions]
    return [float(four == sorted(json.loads(reference))) for four, reference in zip(edges, answer)]

def names_it(completions, answer, **columns):
    return [float(reference in text.rpartition("<answer>")[2]) for text, reference in zip(completions, answer)]

def forgives_a(completions, answer, **columns):
    return [float(text.endswith((reference, "A"))) for text, reference in zip(completions, answer)]

def pays_by_row(completions, answer, pays, **columns):
    return [pay * text.endswith(b) or 0.5 * text.endswith("A") for text, b, pay in zip(completions, answer, pays)]

def upper(completions, answer, **columns):
    return [float(a.isupper() and a.endswith("#### " + b)) for a, b in zip(completions, answer)]
"""
BOXES = [
    {"question": "Where is the dog?", "answer": "[40, 30, 200, 150]", "image_sizes": [[640, 480]]},
    {"question": "Where is the bird?", "answer": "[500, 200, 620, 460]", "image_sizes": [[640, 480]]},
]
CHOICES = [{"question": "Which?", "answer": answer, "options": ["a dog", "a cat", "a bird"]} for answer in "CAB"]


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("check") / "my_rewards.py"
    file.write_text(MINE)
    return file


def check(*arguments: object) -> subprocess.CompletedProcess[str]:
    return finished([sys.executable, "-m", "rewards.check", *map(str, arguments)])


@pytest.mark.parametrize(
    "name", ["correctness", "format", "xml_format", "brevity", "repetition", "overlong", "code", "iou", "choice"]
)
def test_the_built_in_rewards_withstand_what_policies_try(name: str) -> None:
    done = check(name, *(["sandbox=none"] if name == "code" else []))
    assert done.returncode == 0, done.stdout
    assert "no issues found: nothing earned more than it should" in done.stdout
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


def rows_of(tmp_path: Path, rows: list[dict[str, object]]) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def too_much(fn: str, rows: list[dict[str, object]], kwargs: dict[str, object] | None = None) -> dict[str, int]:
    """On how many rows each completion earns more than it should."""
    reward = Reward(fn, "tried", kwargs)
    probes, _ = try_out(reward, rows)
    reward.close()
    assert not reward.errors
    return {probe.name: len(probe.too_much) for probe in probes}


@pytest.mark.parametrize("coordinates", ["original", "shown", "thousandths"])
def test_the_reward_for_boxes_withstands_what_policies_try(coordinates: str) -> None:
    rows = [{**row, "shown_sizes": [[1120, 840]]} for row in BOXES]
    found = too_much("rewards.iou.iou", rows, {"coordinates": coordinates})
    assert {"a hundred boxes", "the whole image", "swapped corners", "the right center, but huge"} <= set(found)
    assert not any(found.values())


def test_the_reward_for_options_withstands_what_policies_try(tmp_path: Path) -> None:
    done = check("choice", "--data", rows_of(tmp_path, CHOICES))
    assert done.returncode == 0, done.stdout
    assert "all options" in done.stdout
    assert "always the first option" in done.stdout


@pytest.mark.parametrize(
    ("function", "rows", "caught"),
    [
        ("best_box", BOXES, {"a hundred boxes": 2, "correct or incorrect": 2, "the whole image": 0}),
        ("covers_it", BOXES, {"the whole image": 2, "the right center, but huge": 2, "swapped corners": 0}),
        ("corners_in_any_order", BOXES, {"swapped corners": 2, "the whole image": 0}),
        ("names_it", CHOICES, {"all options": 3, "always the first option": 0}),
        ("forgives_a", CHOICES, {"always the first option": 2}),
    ],
)
def test_a_naive_reward_for_boxes_or_options_is_caught(
    mine: Path, function: str, rows: list[dict[str, object]], caught: dict[str, int]
) -> None:
    found = too_much(f"{mine}:{function}", rows)
    assert {name: found[name] for name in caught} == caught


def test_a_cheat_is_compared_with_the_correct_one_of_its_row(mine: Path) -> None:
    rows = [{**row, "pays": pay} for row, pay in zip(CHOICES, (1.0, 0.2, 1.0), strict=True)]  # the second is answered A
    assert too_much(f"{mine}:pays_by_row", rows)["always the first option"] == 0


def test_a_problem_is_printed_with_its_brackets(tmp_path: Path) -> None:
    done = check("iou", "--data", rows_of(tmp_path, [{"answer": "left"}]))
    assert done.returncode == 1
    assert "answer 'left': write [x1, y1, x2, y2]" in done.stdout


def test_rows_with_and_without_a_completion_are_one_line(tmp_path: Path) -> None:
    done = check("correctness", "--data", rows_of(tmp_path, [{"answer": "5"}, {"answer": "5", "completion": "#### 5"}]))
    assert done.returncode == 2
    assert "some rows have a correct completion and others do not" in done.stderr


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
        (["corectness"], "corectness: no reward of that name; did you mean correctness?"),
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


def test_rows_whose_columns_have_other_names_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"problem": "2 + 3?", "solution": "5"}\n')
    (tmp_path / "mine.py").write_text("def mine(completions):\n    return [1.0 for _ in completions]\n")
    done = check(f"{tmp_path}/mine.py:mine", "--data", tmp_path / "rows.jsonl")
    assert done.returncode == 2
    assert "rows.jsonl: the rows have: problem, solution;" in done.stderr
    assert "rename the columns" in done.stderr


def test_a_changed_reward_is_compared_on_a_runs_completions(tmp_path: Path) -> None:
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
    per_token = pandas.DataFrame({"completion_id": [0], "advantage": [[0.0, 0.0]]})
    per_token.to_parquet(tmp_path / "completions" / "tokens_00001.parquet")
    assert "1 of 2 completions get" in check("correctness", "find=[hash]", "--run", tmp_path).stdout
    assert "choose one with --name" in check("format", "--run", tmp_path).stderr


def test_a_run_with_messages_is_compared_with_its_own_options(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Think."}, {"role": "user", "content": "2 + 3?"}]
    rows = {
        "step": [1, 1],
        "prompt": [messages, messages],
        "completion": [[{"role": "assistant", "content": text}] for text in ("so 5", "#### 5")],
        "answer": ["5", "5"],
        "correctness": [0.0, 1.0],
        "marked": [0.0, 1.0],
    }
    (tmp_path / "completions").mkdir()
    pandas.DataFrame(rows).to_parquet(tmp_path / "completions" / "completions_00001.parquet")
    reward = {"fn": "rewards.correctness.correctness", "kwargs": {"find": ["hash"]}}
    config = OmegaConf.create({"reward": {"correctness": reward, "marked": reward}})
    OmegaConf.save(config, tmp_path / "resolved_config.yaml")
    assert "0 of 2 completions get another reward" in check("marked", "--run", tmp_path).stdout
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


@pytest.mark.parametrize("answer", ["[40, 30, 200, 150]", "[[40, 30, 200, 150], [300, 30, 460, 150]]"])
def test_boxes_are_correct_in_each_form_and_coordinate_system(answer: str) -> None:
    row = {"answer": answer, "image_sizes": [[640, 480]], "shown_sizes": [[1280, 480]]}
    expected, found = read_reference(answer), correct(row)
    for form in ("xml", "bbox_2d", "box_start"):
        assert (read_boxes(found[form]) == expected).all()
        assert (read_boxes(found[f"{form} in shown pixels"]) == expected * [2, 1, 2, 1]).all()
        assert abs(read_boxes(found[f"{form} in thousandths"]) * ([0.64, 0.48] * 2) - expected).max() < 0.4
    assert "bbox_2d in thousandths" not in correct({"answer": answer})
    assert '"bbox_2d": [40, 30, 200, 150]' in found["bbox_2d"]
    assert "<|box_start|>(40,30),(200,150)<|box_end|>" in found["box_start"]


def test_incorrect_boxes_and_cheats_differ_from_the_correct_box() -> None:
    reference = read_reference(BOXES[0]["answer"])
    tricks = {**incorrect(BOXES[0], "bbox_2d"), **cheats(BOXES[0], "bbox_2d")}
    for name in ("moved by its size", "a quarter of it", "the whole image", "the right center, but huge"):
        assert overlaps(read_boxes(tricks[name]), reference).max() < 0.5
    hundred = read_boxes(tricks["a hundred boxes"])
    assert hundred.shape == (100, 4)
    assert overlaps(hundred, reference).max() == 1
    assert read_boxes(tricks["swapped corners"]).tolist() == [[200, 150, 40, 30]]


def test_the_whole_image_is_no_cheat_where_it_is_mostly_answer() -> None:
    row = {"answer": "[0, 0, 600, 480]", "image_sizes": [[640, 480]]}
    assert not {"the whole image", "the right center, but huge"} & set(cheats(row, "bbox_2d"))


def test_the_first_option_is_a_cheat_unless_it_is_the_answer() -> None:
    tried = [cheats(row, "boxed").get("always the first option") for row in CHOICES]
    assert tried == ["So it is.\n\\boxed{A}", None, "So it is.\n\\boxed{A}"]
    by_text = {"answer": "a cat", "options": ["a dog", "a cat"]}
    assert cheats(by_text, "bare")["all options"] == "a dog, a cat"
    assert incorrect(by_text, "bare") == {"another option": "a dog"}


def test_only_correctness_rewards_fail_on_a_tie_with_the_answer() -> None:
    assert above([1.0, 0.5, None], [1.0, 1.0, 1.0], discriminates=True) == [0]
    assert above([1.0, 1.5, 0.0], [1.0, 1.0, 1.0], discriminates=False) == [1]


def test_a_built_in_reward_is_checked_as_it_is_shipped() -> None:
    assert fn_and_kwargs("brevity", ["enough=7"]) == ("rewards.brevity.brevity", {"enough": 7, "limit": 512})


def test_a_function_that_reads_messages_is_tried_with_messages(tmp_path: Path) -> None:
    file = tmp_path / "published.py"
    file.write_text(
        "def reward(prompts, completions, answer, **columns):\n    assert prompts[0][-1]['role'] == 'user'\n"
        "    return [float(text[0]['content'].endswith('#### ' + a)) for text, a in zip(completions, answer)]\n"
    )
    rows = [{"question": "2 + 3?", "answer": "5"}, {"question": "3 + 4?", "answer": "7"}]
    make = partial(Reward, f"{file}:reward", "published")
    assert fails(make, rows[0])
    assert not fails(make, rows[0], as_messages=True)
    with closing(make()) as reward:
        earned = {probe.name: probe.rewards for probe in try_out(reward, rows, as_messages=True)[0]}
    assert earned["hash"] == [1, 1]
    assert earned["off by one"] == [0, 0]


def test_a_check_gives_the_state_of_a_run_that_is_over(tmp_path: Path) -> None:
    file = tmp_path / "later.py"
    lines = ["def later(completions, trainer_state):", "    done = trainer_state.global_step / trainer_state.max_steps"]
    file.write_text("\n".join([*lines, "    return [done for _ in completions]"]))
    reward = Reward(f"{file}:later", "later")
    try:
        assert score(reward, [{"question": "?"}], ["!"]) == [1.0]
    finally:
        reward.close()


def test_a_broken_line_of_the_data_is_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "a", "answer": "1"}\n\n{"question": "b" "answer"}\n')
    with pytest.raises(ValueError, match=r"rows.jsonl, line 3: Expecting ',' delimiter: '{\"question"):
        read_rows(file, 9)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("nobody/nothing", "nobody/nothing: no folder of this machine, and the hub cannot be reached ("),
        ("/no/folder", "/no/folder: neither a folder of this machine nor a model on the hub"),
        ("", "name the model: model_name_or_path=…"),
    ],
)
def test_a_reward_model_that_cannot_be_fetched_is_a_line(model, message, monkeypatch):
    monkeypatch.setattr(scorer.httpx, "head", partial(unreachable, scorer.httpx))
    with pytest.raises(ValueError, match=f"^reward.model: {re.escape(message)}"):
        bind(load("rewards.model.model", "reward.model.fn"), "model", {"model_name_or_path": model} if model else {})


def unreachable(httpx, address, **options):
    """What a machine without a network answers."""
    raise httpx.ConnectError("[Errno -2] Name or service not known")
