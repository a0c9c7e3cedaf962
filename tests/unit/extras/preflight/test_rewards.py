import math
from pathlib import Path

import numpy as np
import pytest
import torch

from grpo.extras.preflight import rewards
from grpo.extras.preflight.answers import kinds_of, lengths, places, shortest_limit
from grpo.extras.preflight.estimators import table_of
from grpo.extras.preflight.samples import Sample, Sampled, append, read
from grpo.trainer.rollout.advantages import zero_variance


def sample(correct: bool = False, text: str = "", tokens: int = 5, ended: bool = True, **given: float | None) -> Sample:
    return Sample(text, tokens, ended, given or {"correctness": float(correct)}, correct)


def problem(*completions: Sample, number: int = 0) -> Sampled:
    return Sampled(f"key{number}", number, f"prompt {number}", "1", list(completions), {"generate": 1.0, "reward": 0.5})


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_outcomes_are_equal_where_training_sees_no_variance(aggregation: str) -> None:
    random = np.random.default_rng(0)
    values = random.choice([0.0, 0.1, 0.5, 1.0, math.nan], size=(200, 4, 2), p=[0.3, 0.2, 0.2, 0.2, 0.1])
    weights = {"a": 1.0, "b": 0.2}
    for group in values[~np.isnan(values).any(axis=(1, 2))]:
        made = problem(*(sample(a=float(a), b=float(b)) for a, b in group))
        (found,) = rewards.outcomes([made], weights, aggregation)
        equal = zero_variance(torch.tensor(group, dtype=torch.float32), torch.tensor([1.0, 0.2]), 4, aggregation)
        assert (len(set(found)) == 1) == bool(equal.all())


def test_rewards_add_up_in_single_precision() -> None:
    made = problem(sample(a=0.1, b=1.0), sample(a=0.3, b=0.0))
    (found,) = rewards.outcomes([made], {"a": 1.0, "b": 0.2}, "sum_then_normalize")
    assert 0.1 + 0.2 != 0.3
    assert len(set(found)) == 1, "as in a training step"
    (apart,) = rewards.outcomes([made], {"a": 1.0, "b": 0.2}, "normalize_then_sum")
    assert len(set(apart)) == 2, "each reward has advantages of its own"


def test_a_completion_without_any_reward_is_no_outcome() -> None:
    made = problem(sample(a=None, b=None), sample(a=1.0, b=None))
    assert rewards.outcomes([made], {"a": 2.0, "b": 1.0}, "sum_then_normalize") == [[2.0]]
    assert table_of([[2.0]]).tolist() == [[1]]


def test_accuracy_has_pass_at_k_and_needs_a_grader() -> None:
    made = [problem(sample(True), sample(False)), problem(sample(False), sample(False))]
    found = rewards.accuracy(made)
    assert found is not None
    assert found["value"] == 0.25
    assert found["pass@k"]["1"]["value"] == 0.25
    assert found["pass@k"]["2"]["value"] == 0.5
    assert rewards.accuracy([problem(Sample("", 1, True, {}, None))]) is None


def test_a_reward_that_fails_or_never_varies_is_seen() -> None:
    broken = Sample("", 5, True, {"a": None, "b": None}, False, ["b"])
    made = [problem(broken, sample(a=0.5, b=1.0), sample(a=0.5, b=None)) for _ in range(3)]
    found = rewards.of_each(made)
    assert (found["a"]["spread"], found["a"]["varies"], found["a"]["failed"]["value"]) == (0.0, 0.0, 0.0)
    assert (found["b"]["failed"]["value"], found["b"]["mean"]["value"]) == (1 / 3, 1.0)


def test_rewards_contradict_within_problems_not_between_them() -> None:
    against = [problem(sample(a=0.0, b=1.0 + n), sample(a=1.0, b=float(n)), number=n) for n in range(10)]
    (found,) = rewards.contradictions(against)
    assert found["rewards"] == ["a", "b"]
    assert found["correlation"]["value"] == pytest.approx(-1.0)
    between = [problem(sample(a=float(n), b=-float(n)), sample(a=float(n), b=-float(n)), number=n) for n in range(10)]
    assert rewards.contradictions(between) == [], "the means of problems have no part in an advantage"


def test_a_correlation_that_may_be_chance_is_no_contradiction() -> None:
    few = [problem(sample(a=0.0, b=0.4), sample(a=1.0, b=0.0), sample(a=0.2, b=0.3), sample(a=0.6, b=0.9))]
    estimate = rewards.correlation(rewards.pairs_of(few, "a", "b"))
    assert estimate is not None
    assert estimate.value < 0 < estimate.high
    assert rewards.contradictions(few) == []


def test_a_correlation_is_that_of_centred_values() -> None:
    random = np.random.default_rng(0)
    shared = random.normal(size=(200, 8))
    both = [np.stack([row, 0.6 * row + 0.8 * random.normal(size=8)], axis=1) + 5 for row in shared]
    estimate = rewards.correlation([[(float(a), float(b)) for a, b in row] for row in both])
    assert estimate is not None
    assert estimate.value == pytest.approx(0.6, abs=0.05)
    assert estimate.low < 0.6 < estimate.high
    assert rewards.correlation([[(1.0, 2.0), (1.0, 3.0)]]) is None


def test_the_problem_where_rewards_disagree_most_is_first() -> None:
    made = [problem(sample(a=1.0, b=5.0), sample(a=0.0, b=0.0)), problem(sample(a=1.0, b=0.0), number=1)]
    assert [(one["problem"], one["apart"]) for one in rewards.disagreements(made)] == [(1, 1.0)]
    made = [problem(sample(a=0.5, b=0.0)), *made, problem(sample(a=0.9, b=0.0), number=2)]
    assert [one["problem"] for one in rewards.disagreements(made)] == [1, 2, 0]
    assert rewards.disagreements([problem(sample(True))]) == [], "one reward agrees with itself"


def test_the_shortest_limit_loses_one_percent_at_most() -> None:
    assert shortest_limit(list(range(1, 101))) == 99
    assert shortest_limit(list(range(1, 100))) == 99
    assert shortest_limit([7, 3]) == 7
    assert shortest_limit([]) is None


def test_truncated_completions_and_lengths_are_counted() -> None:
    found = lengths([problem(sample(tokens=10, ended=False), sample(True, tokens=4)), problem(sample(tokens=2))], 10)
    assert found["truncated"]["value"] == 0.25, "the mean over problems"
    assert (found["longest"], found["quantiles"]["0.5"], found["shortest_limit"]) == (10, 4, 4)


def test_completions_truncated_inside_a_thought_are_counted() -> None:
    texts = {"<think>so": True, "<think>so</think> 4": False, "so": False, "<think>a</think> <think>b": True}
    made = [problem(sample(text=text, ended=False)) for text in texts] + [problem(sample(text="<think>so"))]
    assert lengths(made, 10)["in_thought"]["value"] == 2 / 5
    assert lengths(made, 10, begins_thought=True)["in_thought"]["value"] == 3 / 5, "the template began the third"


def test_answers_are_found_as_the_grader_looks_for_them() -> None:
    texts = ("so\n#### 4", "it is 5 or 6", "blue", "\\boxed{3}", "words " * 60)
    made = [problem(sample(text=text)) for text in texts]
    found = places(made, kinds_of({"fn": "rewards.correctness.correctness"}))
    assert found is not None
    assert {name: one["value"] for name, one in found.items()} == {
        "marked": 0.4,
        "last_number": 0.2,
        "text": 0.2,
        "none": 0.2,
    }
    assert places(made, kinds_of({"fn": "rewards.code.code"})) is None


def test_samples_are_read_back_but_for_a_torn_line(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    made = [problem(sample(True), number=number) for number in range(3)]
    append(file, made[:2])
    append(file, made[2:])
    assert list(read(file).values()) == made
    with file.open("a") as out:
        out.write('{"key": "torn')
    assert list(read(file).values()) == made
    assert "torn" not in file.read_text()
