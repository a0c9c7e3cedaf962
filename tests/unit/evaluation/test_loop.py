import io
import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from omegaconf import DictConfig
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpo.builtin.tiny
from grpo.config.batch import evaluated_at_once, processes
from grpo.config.schema import train_arguments
from grpo.data.task import load_held_out
from grpo.evaluation.loop import Decoding, Evaluation, _by_difficulty, evaluate
from grpo.evaluation.model import fingerprint
from grpo.generation.transformers.completer import Completer
from rewards.isolation.reward import Reward

TINY = Path(grpo.builtin.tiny.__file__).parent


@pytest.fixture(scope="module")
def held_out(composed: Callable[..., DictConfig]) -> Dataset:
    return load_held_out(composed("task.eval.size=24").task)[0]


@pytest.fixture(scope="module")
def tiny() -> Callable[..., list[str]]:
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype="float32").eval()
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    return Completer(model, tokenizer, 24)


@pytest.fixture(scope="module")
def grader() -> Iterator[Reward]:
    reward = Reward("rewards.correctness.correctness", "correctness")
    yield reward
    reward.close()


def run(
    generate: Any, problems: Dataset, grader: Reward, file: Path, batch: int = 24, **options: Any
) -> dict[str, Any]:
    decoding = Decoding(24, samples=options.pop("samples", 0), seed=options.pop("seed", 0))
    console = Console(file=io.StringIO())
    return evaluate(generate, Evaluation(problems, grader, decoding, file, batch, console, **options))


def test_the_batch_size_does_not_change_the_accuracy(
    tiny: Any, held_out: Dataset, grader: Reward, tmp_path: Path
) -> None:
    one, many = (run(tiny, held_out, grader, tmp_path / f"{size}.jsonl", size) for size in (1, 24))
    assert one == many


def test_a_correct_answer_counts_and_an_incorrect_one_does_not(
    tiny: Any, held_out: Dataset, grader: Reward, tmp_path: Path
) -> None:
    answers = [text.rsplit("#### ")[-1] for text in tiny(list(held_out["prompt"]))]
    columns = held_out.remove_columns("answer")
    correct, incorrect = columns.add_column("answer", answers), columns.add_column("answer", ["0"] * len(answers))
    assert run(tiny, correct, grader, tmp_path / "correct.jsonl")["accuracy"] == 1
    assert run(tiny, incorrect, grader, tmp_path / "incorrect.jsonl")["accuracy"] == 0


def test_prompts_that_read_the_same_get_the_same_completion(tiny: Any, held_out: Dataset) -> None:
    questions = held_out["question"]
    plain = tiny([text + "\n" for text in questions])
    assert plain == tiny([[{"role": "user", "content": text}] for text in questions])


def test_every_completion_is_kept_and_counted(tiny: Any, held_out: Dataset, grader: Reward, tmp_path: Path) -> None:
    result = run(tiny, held_out, grader, tmp_path / "completions.jsonl", samples=4, difficulty="steps")
    rows = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    assert len(rows) == 24 * 5
    greedy = [row for row in rows if row["sample"] == 0]
    sampled = [row for row in rows if row["sample"]]
    assert result["correct"] == sum(row["correct"] for row in greedy)
    assert result["pass@k"]["1"]["value"] == pytest.approx(sum(row["correct"] for row in sampled) / len(sampled))
    solved = {row["problem"] for row in sampled if row["correct"]}
    assert result["pass@k"]["4"]["value"] == pytest.approx(len(solved) / 24)
    assert list(result["maj@k"]) == ["1", "2", "4"]
    assert sum(part["samples"] for part in result["by_difficulty"].values()) == 24
    for found in (*result["pass@k"].values(), *result["maj@k"].values()):
        assert found["interval"][0] <= found["value"] <= found["interval"][1]
    by_sample = [[row["completion"] for row in sampled if row["sample"] == number] for number in (1, 2, 3, 4)]
    assert all(one != other for one, other in combinations(by_sample, 2))


def test_accuracies_are_reported_by_every_kind_of_value() -> None:
    difficulties = [["a"], ["a"], [], {"k": 1}, float("nan"), float("nan"), None, 2, "x"]
    by_difficulty = _by_difficulty(difficulties, [True, False, *[True] * 7])
    assert {value: part["samples"] for value, part in by_difficulty.items()} == {
        **{"['a']": 2, "[]": 1, "{'k': 1}": 1, "nan": 2, "None": 1, "2": 1, "x": 1}
    }
    assert by_difficulty["['a']"]["accuracy"] == 0.5


def test_an_interrupted_evaluation_continues(tiny: Any, held_out: Dataset, grader: Reward, tmp_path: Path) -> None:
    uninterrupted = run(tiny, held_out, grader, tmp_path / "uninterrupted.jsonl", samples=2, batch=8)
    batches: list[int] = []

    def counted(prompts: list[Any], *how: Any, stop_after: int) -> list[str]:
        if len(batches) == stop_after:
            raise KeyboardInterrupt
        batches.append(len(prompts))
        return tiny(prompts, *how)

    file = tmp_path / "broken.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run(partial(counted, stop_after=2), held_out, grader, file, batch=8)
    with file.open("a") as out:
        out.write('{"key": "cut o')
    batches.clear()
    again = run(partial(counted, stop_after=99), held_out, grader, file, samples=2, batch=8)
    assert sum(batches) == 24 * 3 - 16
    assert again["accuracy"] == uninterrupted["accuracy"]
    batches.clear()
    assert run(partial(counted, stop_after=0), held_out, grader, file, samples=2) == again  # all is known


def test_more_samples_are_new_samples(tiny: Any, held_out: Dataset, grader: Reward, tmp_path: Path) -> None:
    file = tmp_path / "completions.jsonl"
    for samples in (2, 4):
        run(tiny, held_out, grader, file, samples=samples)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    by_sample = [[row["completion"] for row in rows if row["sample"] == number] for number in range(1, 5)]
    assert all(len(one) == 24 for one in by_sample)
    assert all(one != other for one, other in combinations(by_sample, 2))


def test_known_completions_are_graded_again(tiny: Any, held_out: Dataset, grader: Reward, tmp_path: Path) -> None:
    file = tmp_path / "completions.jsonl"
    run(tiny, held_out, grader, file)
    (tmp_path / "grader.py").write_text("def all_correct(completions):\n    return [1.0] * len(completions)\n")
    result = run(None, held_out, Reward(f"{tmp_path}/grader.py:all_correct", "grader"), file)
    assert result["accuracy"] == 1
    assert all(json.loads(line)["correct"] for line in file.read_text().splitlines())


def test_a_smaller_evaluation_keeps_what_a_larger_one_has_made(
    tiny: Any, held_out: Dataset, grader: Reward, tmp_path: Path
) -> None:
    file = tmp_path / "completions.jsonl"
    run(tiny, held_out, grader, file)
    run(tiny, held_out.select(range(3)), grader, file)
    assert len(file.read_text().splitlines()) == 24


def test_line_separators_in_a_completion_do_not_break_the_file(
    held_out: Dataset, grader: Reward, tmp_path: Path
) -> None:
    def strange(prompts: list[Any], *how: Any) -> list[str]:
        return ["a\u2028b\u0085c\n#### 5"] * len(prompts)

    for _ in range(2):
        assert run(strange, held_out, grader, tmp_path / "completions.jsonl")["samples"] == 24


def test_equal_numbers_vote_together(held_out: Dataset, grader: Reward, tmp_path: Path) -> None:
    problems = held_out.select([0]).remove_columns("answer").add_column("answer", ["1000"])
    said = iter(["#### 7", "#### 1,000", "#### 7", "#### 1000", "#### 7", "#### $1,000.00"])

    def generate(prompts: list[Any], *how: Any) -> list[str]:
        return [next(said) for _ in prompts]

    result = run(generate, problems, grader, tmp_path / "completions.jsonl", samples=5)
    assert (result["accuracy"], result["maj@k"]["5"]["value"]) == (0, 1)


def test_no_majority_is_taken_where_the_answer_is_not_decisive(held_out: Dataset, tmp_path: Path) -> None:
    (tmp_path / "grader.py").write_text("def all_correct(completions):\n    return [1.0] * len(completions)\n")
    grader = Reward(f"{tmp_path}/grader.py:all_correct", "grader")
    result = run(
        lambda prompts, *how: ["yes"] * len(prompts), held_out, grader, tmp_path / "completions.jsonl", samples=2
    )
    assert result["pass@k"]["2"]["value"] == 1
    assert "maj@k" not in result


def test_another_policy_or_decoding_is_not_taken_for_this_one(
    tiny: Any, held_out: Dataset, grader: Reward, tmp_path: Path
) -> None:
    file = tmp_path / "completions.jsonl"
    for options in ({}, {"policy": "another"}):
        run(tiny, held_out, grader, file, **options)
    assert len(file.read_text().splitlines()) == 48
    for seed in (1, 2):
        run(tiny, held_out, grader, file, samples=1, seed=seed)
    assert len(file.read_text().splitlines()) == 96


def test_completions_the_grader_fails_on_count_as_incorrect(tiny: Any, held_out: Dataset, tmp_path: Path) -> None:
    (tmp_path / "grader.py").write_text(
        "def grade(completions):\n    return [1.0, 0.5] + ['?'] * (len(completions) - 2)\n"
    )
    result = run(tiny, held_out, Reward(f"{tmp_path}/grader.py:grade", "grader"), tmp_path / "completions.jsonl")
    assert (result["correct"], result["grader_errors"]) == (1, {"NotANumber": 22})


def test_on_several_processes_an_error_of_the_grader_counts_once(
    held_out: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "grader.py").write_text("def grade(completions):\n    return ['?'] * len(completions)\n")
    monkeypatch.setattr("grpo.evaluation.loop.world_size", lambda: 2)
    monkeypatch.setattr("grpo.evaluation.loop.gathered", lambda rows: rows)  # of this process alone
    errors = []
    for rank in range(2):
        monkeypatch.setattr("grpo.evaluation.loop.rank", lambda rank=rank: rank)
        grader = Reward(f"{tmp_path}/grader.py:grade", "grader")
        generate, three = lambda prompts, *how: ["5"] * len(prompts), held_out.select(range(3))
        errors.append(run(generate, three, grader, tmp_path / f"{rank}.jsonl")["grader_errors"]["NotANumber"])
    assert errors == [2, 1], "each process generates two, the last one a copy"


OTHER = {
    "data type": ("model.dtype=bfloat16",),
    "revision": ("model.model_revision=other",),
    "attention": ("model.attn_implementation=eager",),
    "pixels": ("task.max_pixels=1000",),
    "quantization": ("peft=qlora",),
}


def test_what_decides_a_completion_tells_evaluations_apart(composed: Callable[..., DictConfig], tmp_path: Path) -> None:
    found = {name: fingerprint(composed(*words), str(TINY), "transformers", False) for name, words in OTHER.items()}
    found["nothing"] = fingerprint(composed(), str(TINY), "transformers", False)
    found["vLLM"] = fingerprint(composed(), str(TINY), "vllm", False)
    found["GPU"] = fingerprint(composed(), str(TINY), "transformers", True)
    model = shutil.copytree(TINY, tmp_path / "model")
    found["another folder"] = fingerprint(composed(), str(model), "transformers", False)
    (model / "tokenizer_config.json").write_text("{}")
    found["another chat template"] = fingerprint(composed(), str(model), "transformers", False)
    assert len(set(found.values())) == len(found)
    assert fingerprint(composed("evaluate.samples=3"), str(TINY), "transformers", False) == found["nothing"]


@pytest.mark.parametrize(("overrides", "expected"), [((), 128), (("train.per_device_eval_batch_size=5",), 5)])
def test_an_evaluation_takes_as_many_problems_as_a_rollout(
    composed: Callable[..., DictConfig], overrides: tuple[str, ...], expected: int
) -> None:
    config = composed(
        "+gpu=any", "train.per_device_train_batch_size=32", "train.gradient_accumulation_steps=4", *overrides
    )
    assert evaluated_at_once(config.train, processes(config)) == expected
    assert "per_device_eval_batch_size" not in train_arguments(config.train) or overrides
