"""Each finding is made about a run with the fault, and not about a run without it."""

import contextlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from grpo.extras.doctor.diagnose import diagnose, open_questions
from grpo.extras.doctor.diagnosis import Diagnosis
from grpo.extras.doctor.read import read
from grpo.utils.errors import ConfigError
from tests.page_fixtures import write_run
from tests.unit.extras.doctor import logs


def of_metrics(folder: Path, steps: int = 40, **changes: Any) -> dict[str, Diagnosis]:
    """The findings about a log of TRL's by their names."""
    history, run = read(logs.trl(folder, logs.learning(steps, **changes)))
    return {diagnosis.name: diagnosis for diagnosis in diagnose(history, run)}


def of_tables(folder: Path, steps: int = 8, **columns: Callable[[int, int], Any]) -> dict[str, Diagnosis]:
    """The findings about tables of completions by their names."""
    history, run = read(logs.write_tables(folder, steps, **columns))
    return {diagnosis.name: diagnosis for diagnosis in diagnose(history, run)}


def late(before: Any, after: Any) -> Callable[[int], Any]:
    """A value in the first 25 steps, and another in those behind."""
    return lambda place: before if place < 25 else after


def alarms(findings: dict[str, Diagnosis]) -> set[str]:
    return {name for name, diagnosis in findings.items() if diagnosis.severity != "info"}


def test_a_healthy_run_has_information_alone(tmp_path: Path) -> None:
    findings = of_metrics(tmp_path)
    assert alarms(findings) == set()
    assert "which is normal" in findings["loss_zero"].title
    assert alarms(of_tables(tmp_path / "b")) == set()


FAULTS: list[tuple[str, dict[str, Any], str]] = [
    ("learning_rate_zero", {"learning_rate": 0.0}, "learning_rate 0 in all 40 logged steps"),
    ("learning_rate_ended", {"learning_rate": late(1e-5, 0.0)}, "1e-05 in step 25, then 0 in the last 15 of 40"),
    ("gradient_not_finite", {"grad_norm": late(0.3, math.nan)}, "15 of 40 logged steps; step 26: nan"),
    ("gradient_not_finite", {"loss": late(0.3, math.inf)}, "15 of 40 logged steps; step 26: inf"),
    ("gradient_zero", {"grad_norm": 0.0}, "grad_norm 0 in 40 of 40 steps"),
    ("gradient_exploded", {"grad_norm": late(0.3, 40.0)}, "0.3 in the first half of the run, 40 in the last quarter"),
    ("kl_dominates", {"kl": lambda place: 1e-3 * place, "loss": lambda place: 5e-3 * place}, "loss = 5 x kl"),
    ("kl_dominates", {"actor/kl_coef": 3.0, "kl": 0.01}, "kl_coef 3"),
    ("kl_exploded", {"kl": late(0.1, 8.0)}, "KL 8 nats per token in the last quarter, above 1 since step 26"),
    ("reward_constant", {"reward": 0.5, "reward_std": 0.0}, "reward 0.5 in all 40 logged steps, reward_std 0"),
    ("reward_constant", {"reward": 0.0, "reward_std": "unlogged"}, "reward 0 in all 40 logged steps"),
    ("reward_missing", {"reward": late(0.5, None)}, "no reward in 15 of 40 steps, the first of them 26"),
    ("zero_variance_missed", {"reward_std": 1e-8, "frac_reward_zero_std": 0.0}, "40 steps have equal rewards only"),
    ("collapse", {"reward": late(0.6, 0.1), "learning_rate": late(1e-5, 1e-3)}, "learning_rate 1e-05 before, 0.001"),
    ("mismatch", {"sampling/sampling_logp_difference/mean": 0.3}, "40 of 40 steps differ by more than 0.1"),
    ("engine_drifts", {"sampling/sampling_logp_difference/mean": lambda place: 0.001 * place}, "in the last"),
    ("engine_drifts", {"rollout_corr/k3_kl": lambda place: 0.001 * place}, "rollout_corr/k3_kl 0.0045 in the first"),
    ("engine_gap", {"sampling/importance_sampling_ratio/mean": 0.3}, "mean importance ratio 0.3"),
    ("engine_gap", {"rollout_corr/k3_kl": 0.2}, "rollout_corr/k3_kl 0.2"),
    ("cut_off", {"completions/clipped_ratio": 0.4}, "40% of those in the last quarter reach max_completion_length=50"),
    ("entropy_collapsed", {"entropy": late(0.5, 0.01)}, "0.5 nats per token at the beginning, 0.01 at the end"),
    ("groups_equal", {"frac_reward_zero_std": 0.95}, "95% of the groups in the last quarter have zero variance"),
    ("never_fired", {"rewards/form/mean": 0.0, "rewards/form/std": 0.0}, "in all of 40 logged steps"),
]


@pytest.mark.parametrize(
    ("name", "changes", "evidence"), FAULTS, ids=[f"{row[0]} {next(iter(row[1]))}" for row in FAULTS]
)
def test_a_fault_of_the_metrics_is_reported(tmp_path: Path, name: str, changes: dict[str, Any], evidence: str) -> None:
    findings = of_metrics(tmp_path, **changes)
    assert name in alarms(findings)
    assert evidence in findings[name].evidence
    assert findings[name].advice
    assert "train." not in f"{findings[name].evidence} {findings[name].advice}", "names of other trainers"


@pytest.mark.parametrize(
    "changes",
    [
        {"learning_rate": lambda place: 1e-5 * min(1, place / 20)},  # a warm-up
        {"learning_rate": lambda place: 1e-5 * (1 - place / 39)},  # a linear schedule, 0 in the last step
        {"sampling/sampling_logp_difference/mean": 0.03, "sampling/importance_sampling_ratio/mean": 0.9},
        {"sampling/sampling_logp_difference/mean": lambda place: 0.06 if place in (5, 31, 33, 35, 37, 39) else 0.005},
        {"kl": lambda place: 1e-3 * place, "loss": lambda place: 4e-5 * place},  # beta 0.04
        {"grad_norm": lambda place: 50.0 if place == 30 else 0.3},  # a spike
        {"reward": lambda place: "unlogged" if place % 2 else 0.3 + 0.01 * place},  # two updates per rollout
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_run_without_the_fault_is_not_reported(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert alarms(of_metrics(tmp_path, **changes)) == set()


def test_a_consequence_is_not_reported_beside_its_cause(tmp_path: Path) -> None:
    gap: dict[str, Any] = {
        "sampling/sampling_logp_difference/mean": 0.3,
        "sampling/importance_sampling_ratio/mean": 0.3,
    }
    assert alarms(of_metrics(tmp_path, **gap)) == {"mismatch"}
    gap["sampling/sampling_logp_difference/mean"] = lambda place: 0.01 * place
    assert alarms(of_metrics(tmp_path, **gap)) == {"engine_drifts"}


def test_a_solved_task_is_no_fault(tmp_path: Path) -> None:
    solved: dict[str, Any] = {"frac_reward_zero_std": 0.95, "entropy": late(0.5, 0.01)}
    for name in ("reward", "rewards/correct/mean"):
        solved[name] = lambda place: min(0.97, 0.3 + place / 30)
    for name in ("reward_std", "rewards/correct/std"):
        solved[name] = lambda place: (min(0.97, 0.3 + place / 30) * (1 - min(0.97, 0.3 + place / 30))) ** 0.5
    findings = of_metrics(tmp_path, **solved)
    assert alarms(findings) == set()
    assert findings["too_easy"].severity == "info"


def length(group: int, place: int) -> float:
    """The length of the completion that `logs.table` has at a place of a group, less 5."""
    return float((7 * place + group) % 5)


TABLES: list[tuple[str, dict[str, Callable[[int, int], Any]], str]] = [
    ("identical", {"completion": lambda group, place: f"\x1b[31m{group}"}, r"4 times '\x1b[31m0'"),
    ("length_only", {"advantage": lambda group, place: 0.1 * length(group, place)}, "correlation +1.000 within 64"),
    ("length_only", {"advantage": lambda group, place: -0.1 * length(group, place)}, "correlation -1.000 within 64"),
    (
        "length_only",
        {"advantage": lambda group, place: None, "correct": length},
        "+1.000 within 64 groups (14 standard errors from 0): longer completions always have the higher reward",
    ),
    ("reward_missing", {"correct": lambda group, place: None if place else 1.0}, "192 of 256 completions have none"),
    ("reward_missing", {"correct": lambda group, place: math.nan if place else 1.0}, "such as 'xxxxxxx' in step 1"),
    ("reward_constant", {"correct": lambda group, place: 0.0}, "reward 0 in all 8 logged steps"),
]


@pytest.mark.parametrize(("name", "columns", "evidence"), TABLES)
def test_a_fault_of_the_completions_is_reported(
    tmp_path: Path, name: str, columns: dict[str, Callable[[int, int], Any]], evidence: str
) -> None:
    findings = of_tables(tmp_path, **columns)
    assert name in alarms(findings)
    assert evidence in findings[name].evidence


def test_a_reward_of_two_values_is_no_length(tmp_path: Path) -> None:
    columns = {"completion": lambda group, place: "x" * (9 + place), "correct": lambda group, place: float(place > 1)}
    columns["advantage"] = columns["correct"]
    assert alarms(of_tables(tmp_path, **columns)) == set()


def test_a_length_beside_another_reward_is_no_fault(tmp_path: Path) -> None:
    both = {"short": lambda group, place: -length(group, place)}
    assert alarms(of_tables(tmp_path / "a", **both)) == set()
    assert alarms(of_tables(tmp_path / "b", **both, advantage=lambda group, place: None)) == set(), "without weights"


def test_identical_completions_of_a_solved_task_are_no_fault(tmp_path: Path) -> None:
    columns = {"completion": lambda group, place: "x" * (9 + place), "correct": lambda group, place: float(place > 1)}
    logs.write_tables(tmp_path, 10, **columns)
    solved = {"completion": lambda group, place: "x", "correct": lambda group, place: 1.0}
    for step in range(5, 11):
        logs.table(step, **solved).to_parquet(tmp_path / "completions" / f"completions_{step:05d}.parquet")
    history, _ = read(tmp_path)
    assert "identical" not in {diagnosis.name for diagnosis in diagnose(history, None)}
    solved["correct"] = lambda group, place: 0.0
    for step in range(5, 11):
        logs.table(step, **solved).to_parquet(tmp_path / "completions" / f"completions_{step:05d}.parquet")
    history, _ = read(tmp_path)
    assert "identical" in {diagnosis.name for diagnosis in diagnose(history, None)}


@pytest.mark.parametrize("weight", [0.2, 0.0], ids=["equal", "without weight"])
def test_groups_are_counted_exactly_where_tables_are(tmp_path: Path, weight: float) -> None:
    """A constant reward in float32 has a standard deviation of 1.5e-8, which TRL takes for a difference."""

    def reward(group: int, place: int) -> float:
        return float(group % 2 if weight else place)

    logs.write_tables(tmp_path, 40, correct=reward, advantage=lambda group, place: 7e-5)
    logs.trl(tmp_path, logs.learning(40, frac_reward_zero_std=0.0))
    history, run = read(tmp_path)
    findings = {diagnosis.name: diagnosis for diagnosis in diagnose(history, run)}
    assert findings["groups_equal"].evidence.startswith("100% of the groups in the last quarter have zero variance")
    assert findings["zero_variance_missed"].evidence == "40 of 40 steps; step 1: 100% of the groups, TRL: 0%"
    assert findings["zero_variance_missed"].severity == "info"


def test_weights_of_rewards_follow_from_the_log(tmp_path: Path) -> None:
    values = {"reward": lambda place: 0.5 + 0.01 * place + 0.1 * (place % 3)}
    values |= {"rewards/correct/mean": lambda place: 0.5 + 0.01 * place, "rewards/short/mean": lambda place: place % 3}
    drowned = of_metrics(tmp_path, **values, **{"rewards/short/std": 0.15})["drowned"]
    assert drowned.evidence.endswith("short 0.015")
    assert drowned.severity == "info"


def test_what_is_not_logged_is_named(tmp_path: Path) -> None:
    rows = logs.learning(6, entropy="unlogged", **{"completions/clipped_ratio": "unlogged"})
    history, _ = read(logs.trl(tmp_path, rows))
    assert open_questions(history) == [
        "truncation (completions/clipped_ratio)",
        "entropy (entropy)",
        "distance from the reference (kl)",
        "engine against policy (sampling/sampling_logp_difference/mean)",
        "identical completions, and rewards by length (tables of completions)",
        "trends: 6 logged steps, of the 10 that they need",
    ]


def test_a_run_of_this_project_has_the_findings_of_its_page(tmp_path: Path, composed: Callable[..., Any]) -> None:
    history, run = read(write_run(tmp_path / "run", 40, 4, 4))
    assert run is not None
    assert len(history.groups) == 4, "the same in every step"
    assert alarms({diagnosis.name: diagnosis for diagnosis in diagnose(history, run)}) == set()
    text = (run.folder / "metrics.jsonl").read_text()
    failed = '"engine/is_policy": 0.0, "engine/logp_difference": 0.4, "engine/tolerance": 0.1'
    (run.folder / "metrics.jsonl").write_text(text.replace('"entropy": 0.5', failed))
    history, run = read(tmp_path / "run")
    finding = diagnose(history, run)[0]
    assert finding.evidence.startswith("after step 1 the log-probabilities differ by 0.4")
    assert "docs/vllm.md" in finding.advice


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**30), 10**30), st.floats(), st.text(max_size=5), st.lists(st.integers())
)
NAMES = [*logs.learning(1)[0], "kl", "beta", "rewards/${x}/mean", "rewards//mean", "actor/kl_coef", "tools/x/calls"]
NAMES += ["sampling/sampling_logp_difference/mean", "rollout_corr/k3_kl", "data", "tools/failure_frequency"]


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(
    rows=[{"reward": 1e300 * (-1) ** place, "kl": 1e200, "loss": 1e200 * place} for place in range(30)], constant=0
)
@given(rows=st.lists(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=8), max_size=30), constant=VALUES)
def test_any_values_in_a_log_are_judged_or_refused(tmp_path: Path, rows: list[Any], constant: Any) -> None:
    logged = [{"step": place, "reward": constant, "kl": constant} | row for place, row in enumerate(rows)]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": [*logged, constant]}))
    with contextlib.suppress(ConfigError):
        history, run = read(tmp_path)
        json.dumps([diagnosis.as_dict() for diagnosis in diagnose(history, run)] + open_questions(history))
