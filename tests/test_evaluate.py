import io
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist

import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import DictConfig
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpo.tiny
from grpo.data import load_task
from grpo.evaluate import complete, evaluate, wilson_interval
from rewards.correctness import correctness

TINY = Path(grpo.tiny.__file__).parent


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_ends_of_the_interval_are_where_the_score_test_rejects(counts: tuple[int, int]) -> None:
    correct, samples = counts
    share, z = correct / samples, NormalDist().inv_cdf(0.975)
    low, high = wilson_interval(correct, samples)
    assert 0 <= low <= share + 1e-12
    assert share - 1e-12 <= high <= 1
    for end in (low, high):  # Wilson's interval solves this equation for the true proportion
        assert (share - end) ** 2 == pytest.approx(z**2 * end * (1 - end) / samples, abs=1e-12)


@pytest.fixture(scope="module")
def held_out(composed: Callable[..., DictConfig]) -> Dataset:
    return load_task(composed("task.dataset.size=1", "task.eval.size=24").task)[1]


def outcome(problems: Dataset, batch_size: int) -> dict:
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype="float32").train()
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    found = evaluate(model, tokenizer, problems, correctness, 24, batch_size, Console(file=io.StringIO()))
    assert model.training  # as it was
    return found


def test_the_batch_size_does_not_change_the_accuracy(held_out: Dataset) -> None:
    assert outcome(held_out, 1) == outcome(held_out, 24)


def test_a_right_answer_counts_and_a_wrong_one_does_not(held_out: Dataset) -> None:
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    answers = [text.rsplit("#### ")[-1] for text in complete(model, tokenizer, list(held_out["prompt"]), 24)]
    columns = held_out.remove_columns("answer")
    assert outcome(columns.add_column("answer", answers), 24)["accuracy"] == 1
    assert outcome(columns.add_column("answer", ["0"] * len(answers)), 24)["accuracy"] == 0


def test_plain_and_conversational_prompts_that_read_the_same_get_the_same_completion(held_out: Dataset) -> None:
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    questions = held_out["question"]
    plain = complete(model, tokenizer, [text + "\n" for text in questions], 24)
    chat = complete(model, tokenizer, [[{"role": "user", "content": text}] for text in questions], 24)
    assert plain == chat
