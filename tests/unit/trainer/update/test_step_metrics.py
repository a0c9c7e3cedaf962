"""TRL's metrics of a step, from those of its micro-batches."""

import math

import pytest

from grpo.trainer.update.step_metrics import StepMetrics, merge


def step(by_sequence: bool = False, tokens: int = 100, rows: int = 10, skipped: int = 0, skipped_tokens: int = 0):
    return StepMetrics(by_sequence, tokens, rows, skipped, skipped_tokens, microbatches=2, padded_tokens=120)


def test_means_over_tokens_are_weighted_by_tokens() -> None:
    metrics = step()
    metrics.add({"entropy": [1.0], "kl": [0.1]}, tokens=75, rows=5, policy_weight=0.5)
    metrics.add({"entropy": [3.0], "kl": [0.5]}, tokens=25, rows=5, policy_weight=0.5)
    result = metrics.result()
    assert result["entropy"] == pytest.approx(1.5)
    assert result["update/entropy"] == pytest.approx(1.5)
    assert result["kl"] == pytest.approx(0.2)


def test_clip_ratios_of_whole_sequences_are_weighted_by_rows() -> None:
    metrics = step(by_sequence=True)
    metrics.add({"clip_ratio/low_mean": [1.0]}, tokens=1, rows=4, policy_weight=0.5)
    metrics.add({"clip_ratio/low_mean": [0.0]}, tokens=99, rows=6, policy_weight=0.5)
    assert metrics.result()["clip_ratio/low_mean"] == pytest.approx(0.4)


def test_skipped_rows_count_as_not_clipped_and_have_no_entropy() -> None:
    metrics = step(skipped=5, skipped_tokens=50)
    recorded = {"clip_ratio/high_mean": [0.4], "clip_ratio/low_min": [0.2], "entropy": [2.0]}
    metrics.add(recorded, tokens=50, rows=5, policy_weight=1.0)
    result = metrics.result()
    assert result["clip_ratio/high_mean"] == pytest.approx(0.2)
    assert result["clip_ratio/low_min"] == 0.0
    assert result["update/entropy"] == 2.0
    assert "entropy" not in result
    assert result["update/rows_skipped"] == 5


def test_extremes_are_over_all_microbatches_that_are_not_empty() -> None:
    metrics = step()
    for low, high in ((0.3, 0.4), (math.nan, math.nan), (0.1, 0.2)):
        metrics.add({"clip_ratio/low_min": [low], "clip_ratio/high_max": [high]}, 10, 1, 0.3)
    result = metrics.result()
    assert (result["clip_ratio/low_min"], result["clip_ratio/high_max"]) == (0.1, 0.4)


def test_the_policy_loss_is_the_weighted_sum() -> None:
    metrics = step()
    metrics.add({"policy_loss": [2.0]}, 10, 1, 0.25)
    metrics.add({"policy_loss": [4.0]}, 90, 9, 0.75)
    assert metrics.result()["policy_loss"] == pytest.approx(3.5)


def test_processes_are_merged_as_if_they_were_one() -> None:
    first, second = step(), step(skipped=2, skipped_tokens=20)
    first.add({"entropy": [1.0], "clip_ratio/low_min": [0.5]}, 100, 10, 1.0)
    second.add({"entropy": [4.0], "clip_ratio/low_min": [0.2]}, 50, 8, 1.0)
    second.microbatches = 7
    result = merge([first, second]).result()
    assert result["update/entropy"] == pytest.approx(2.0)
    assert result["clip_ratio/low_min"] == 0.0
    assert (result["update/rows_skipped"], result["update/microbatches"]) == (2, 7)
    assert result["update/padded_tokens"] == 240


def test_a_step_in_which_nothing_was_computed_has_ratios_of_zero() -> None:
    metrics = step(skipped=10, skipped_tokens=100)
    recorded = {"clip_ratio/low_mean": [0.0], "clip_ratio/low_min": [math.nan], "entropy": [math.nan]}
    metrics.add(recorded, tokens=0, rows=0, policy_weight=0.0)
    result = metrics.result()
    assert result["clip_ratio/low_mean"] == result["clip_ratio/low_min"] == 0.0
    assert not {"entropy", "update/entropy"} & result.keys(), "it is not known"
