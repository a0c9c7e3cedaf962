"""The rules against metrics recorded from real runs of the built-in task; `overrides` in each file made them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import DictConfig

from grpo.reporting.findings import RULES, findings
from grpo.rundir.run_dir import Run, with_zero_variance

RECORDED = Path(__file__).parent / "recorded"
FOUND = {
    "healthy": set(),
    "healthy_1": set(),
    "healthy_lora": set(),
    "reward_flat": {"reward_flat"},
    "reward_fell": {"reward_fell", "groups_equal", "cut_off"},
    "too_easy": {"too_easy"},
    "too_hard": {"too_hard", "never_fired", "cut_off", "reward_flat"},
    "cut_off": {"cut_off", "too_hard", "reward_fell"},
    "entropy_collapsed": {"entropy_collapsed", "groups_equal", "hacking"},
    "kl_exploded": {"kl_exploded", "groups_equal", "cut_off", "reward_fell"},
    "hacking": {"hacking", "groups_equal"},
    "drowned": {"drowned"},
    "reward_errors": {"reward_errors"},
    "steps_skipped": {"steps_skipped"},
    "mismatch": {"mismatch", "too_few_steps"},
    "memory_near_limit": {"memory_near_limit"},
}


@pytest.fixture
def recorded(composed: Callable[..., DictConfig]) -> Callable[[str], Run]:
    """A function from the name of a recording to the run it is of."""

    def read(name: str) -> Run:
        content = json.loads((RECORDED / f"{name}.json").read_text())
        columns = content.pop("metrics")
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        return Run(folder=Path(name), config=composed(*content["overrides"]), metrics=rows, **content)

    return read


@pytest.mark.parametrize("name", FOUND)
def test_a_recorded_run_shows_its_own_findings_and_no_others(name, recorded):
    assert {finding.name for finding in findings(recorded(name))} == FOUND[name]


def test_every_recording_is_looked_at():
    assert {file.stem for file in RECORDED.glob("*.json")} == set(FOUND)


ON_GPUS = {"engine_differs", "sequences_masked", "host_memory_grows", "fragments", "gpu_idle"}
WITH_TOOLS = {"never_called", "tools_fail", "turns_used_up", "never_equal"}
OF_TASKS = {"task_equal", "task_worse"}
CONSTRUCTED = ON_GPUS | WITH_TOOLS | OF_TASKS | {"accuracy_fell", "guard_acted"}
"""Rules about what no recording shows; each has a test below."""


def test_every_other_rule_is_shown_by_a_recording(recorded):
    runs = [recorded(name) for name in FOUND]
    assert {rule.__name__ for rule in RULES if not any(rule(run) for run in runs)} == CONSTRUCTED


def with_metrics(run, **functions):
    """The run with further metrics, each a function of the step."""
    rows = [{**row, **{name: value(row["step"]) for name, value in functions.items()}} for row in run.metrics]
    return replace(run, metrics=rows)


def test_an_engine_that_is_not_the_policy_comes_first(recorded):
    run = recorded("healthy")
    verdict = {"step": 50, "engine/is_policy": 0.0, "engine/logp_difference": 0.83, "engine/tolerance": 0.15}
    first, *_ = findings(replace(run, metrics=[*run.metrics, verdict]))
    assert first.name == "engine_differs"
    assert first.evidence.startswith(
        "after step 50 the log-probabilities differ by 0.83 nats per token; rounding makes"
    )
    healthy = with_metrics(run, **{"engine/is_policy": lambda step: 1.0 if step % 50 == 0 else None})
    assert findings(healthy) == []


def test_what_a_guard_did_is_reported(recorded, tmp_path):
    run = replace(recorded("healthy"), folder=tmp_path)

    def found(*events):
        looks = [{"step": step, "event": event, "reason": f"it {event}"} for step, event in enumerate(events)]
        (tmp_path / "guard.jsonl").write_text("".join(json.dumps(look) + "\n" for look in looks))
        return findings(run)

    assert found("best", None, "best") == []
    (one,) = found("best", "rollback", None, "rollback")
    assert one.title == "Accuracy fell, and the run went back to its best checkpoint"
    assert one.evidence == "step 1: it rollback; step 3: it rollback"
    assert f"train.learning_rate={run.config.train.learning_rate / 4:g}" in one.advice
    assert found("rollback", "fall")[0].name == "guard_fall"
    assert found("plateau")[0].name == "guard_plateau"
    assert "reward_errors.jsonl" in found("skipped")[0].advice


def test_a_run_of_an_earlier_version_has_trls_count():
    older = {"frac_reward_zero_std": 0.9, "frac_reward_zero_std/words": 0.5}
    read = with_zero_variance(older)
    assert (read["rollout/zero_variance"], read["rollout/zero_variance/words"]) == (0.9, 0.5)
    assert with_zero_variance(older | {"rollout/zero_variance": 1.0})["rollout/zero_variance"] == 1.0


def test_tasks_that_are_equal_or_become_worse_are_reported(recorded, composed):
    tasks = ["task=mixture", "+task@task.tasks.words=arithmetic", "+task@task.tasks.sums=sums"]
    run = replace(recorded("healthy"), config=composed(*tasks, "task.tasks.sums.weight=3"))
    equal = {"rollout/zero_variance/words": lambda step: 0.4, "rollout/zero_variance/sums": lambda step: 0.97}
    (one,) = findings(with_metrics(run, **equal))
    assert (one.name, one.title) == ("task_equal", "Nothing is learned from task sums")
    assert one.evidence == "zero-variance groups in the last quarter: sums 97%"
    assert one.advice.startswith("lower task.tasks.sums.")
    assert findings(with_metrics(run, **equal | {"rollout/zero_variance/sums": lambda step: 0.8})) == []

    def worse(after: float) -> list:
        accuracies, sums = {"before": 0.8, "after": after}, {"accuracy": 0.5, "interval": [0.4, 0.6]}
        words = {when: {"accuracy": at, "interval": [at - 0.05, at + 0.05]} for when, at in accuracies.items()}
        total = {"before": 0.1, "after": 0.9}  # of all, with a third task
        evaluation = {
            when: {"accuracy": total[when], "samples": 99, "by_task": {"words": words[when], "sums": sums}}
            for when in accuracies
        }
        return findings(replace(run, evaluation=evaluation))

    (one,) = worse(after=0.6)
    assert (one.name, one.evidence) == ("task_worse", "words 80.0% before, 60.0% after")
    assert worse(after=0.75) == []


@pytest.mark.parametrize(("share", "found"), [(0.05, False), (0.4, True)])
def test_sequences_that_the_mask_removes_are_reported(share, found, recorded):
    run = with_metrics(recorded("healthy"), **{"sampling/masked_share": lambda step: share})
    assert [finding.name for finding in findings(run)] == ["sequences_masked"] * found
    assert not found or findings(run)[0].title == "The importance-sampling mask removes sequences"


def test_rewards_that_fail_are_reported_while_the_run_runs(recorded):
    run = recorded("reward_errors")
    summary = {key: value for key, value in run.summary.items() if key != "reward_errors"}
    name = next(iter(run.config.reward))
    none = [{key: value for key, value in row.items() if not key.endswith("/errors")} for row in run.metrics]
    rows = [row | {f"rewards/{name}/errors": 3.0} for row in none]
    (one,) = [one for one in findings(replace(run, summary=summary, metrics=rows)) if one.name == "reward_errors"]
    assert f"reward.{name}: {3 * len(rows)} in the logged steps" in one.evidence
    healthy = replace(run, summary=summary, metrics=none)
    assert "reward_errors" not in {one.name for one in findings(healthy)}


@pytest.mark.parametrize(
    ("memory", "found"),
    [
        (lambda step: 3.0 + 0.01 * step, True),
        (lambda step: 3.0 + min(step, 30) * 0.05, False),  # warming up
        (lambda step: 3.0 + 0.3 * (step % 7 == 0), False),
    ],
    ids=["grows", "settles", "varies"],
)
def test_growing_host_memory_is_reported_with_what_is_left(memory, found, recorded):
    run = replace(with_metrics(recorded("healthy"), **{"memory/host_gb": memory}), plan={"host_capacity_gb": 32.0})
    assert [finding.name for finding in findings(run)] == ["host_memory_grows"] * found
    if found:
        assert "10 MiB per step, which is full after 2" in findings(run)[0].evidence


def test_memory_that_is_reserved_and_not_allocated_is_reported(recorded):
    run = recorded("healthy")
    peaks = {"memory/peak_allocated_gb": 30.0, "memory/peak_reserved_gb": 47.0}
    (finding,) = findings(replace(run, summary={**run.summary, **peaks}, plan={"capacity_gb": 80.0}))
    assert finding.name == "fragments"
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in finding.advice


@pytest.mark.parametrize(
    ("seconds", "advice"),
    [({"time/reward": 9.0}, "reward.<name>.workers"), ({"time/generate": 9.0}, "generation=vllm_colocate")],
)
def test_an_idle_gpu_is_reported_with_advice_on_its_main_phase(seconds, advice, recorded):
    metrics = {"gpu/utilization": 0.2, "time/reward": 1.0, "time/generate": 1.0, "time/update": 1.0, **seconds}
    run = with_metrics(recorded("healthy"), **{name: lambda step, v=value: v for name, value in metrics.items()})
    (finding,) = findings(run)
    assert finding.name == "gpu_idle"
    assert finding.evidence.startswith("20% utilization")
    assert advice in finding.advice
    assert findings(with_metrics(run, **{"gpu/utilization": lambda step: 0.9})) == []


def test_a_finding_has_its_evidence_and_advice(recorded):
    (finding,) = findings(recorded("drowned"))
    assert finding.title == "reward.brevity dominates reward.correctness"
    assert finding.evidence == "weight times standard deviation: brevity 8.94, correctness 0.464"
    assert "raise reward.correctness.weight or lower reward.brevity.weight=50" in finding.advice


def test_hacking_names_the_reward_that_rose(recorded):
    finding = next(found for found in findings(recorded("hacking")) if found.name == "hacking")
    assert "most of it from reward.brevity (+1.12)" in finding.evidence
    assert "held-out accuracy 11.0% before, 3.0% after" in finding.evidence


@pytest.mark.parametrize(("answers", "found"), [(0.0, True), (0.02, True), (0.06, False)])
def test_rising_sampled_or_held_out_accuracy_is_no_hacking(answers, found, recorded):
    run = recorded("hacking")
    after = {"accuracy": 0.11 + answers, "samples": 200, "interval": [0, 1]}
    changed = replace(run, evaluation={**run.evaluation, "after": after})
    assert ("hacking" in {finding.name for finding in findings(changed)}) == found
    rows = [{**row, "rewards/correctness/mean": row["step"] / 100} for row in run.metrics]
    assert "hacking" not in {finding.name for finding in findings(replace(changed, metrics=rows))}


def test_a_reward_that_rose_little_is_not_blamed(recorded):
    run = recorded("hacking")
    rows = [{**row, "rewards/brevity/mean": 0.3 + row["step"] / 1e4} for row in run.metrics]
    finding = next(found for found in findings(replace(run, metrics=rows)) if found.name == "hacking")
    assert "brevity" not in finding.evidence + finding.advice


def test_a_reward_that_returns_nothing_has_never_fired(recorded):
    run = with_metrics(
        recorded("healthy"), **{f"rewards/correctness/{of}": lambda step: None for of in ("mean", "std")}
    )
    titles = [finding.title for finding in findings(run) if finding.name == "never_fired"]
    assert titles == ["reward.correctness gave 0, or None, to every completion"]


def test_a_penalty_that_nothing_has_earned_is_no_finding(recorded, composed):
    run = recorded("healthy")
    rows = [{**row, "rewards/overlong/mean": 0.0, "rewards/overlong/std": 0.0} for row in run.metrics]
    assert findings(replace(run, config=composed("+reward=overlong"), metrics=rows)) == []


def test_a_reward_that_nearly_all_have_earned_is_not_dominated(recorded, composed):
    run = recorded("healthy")
    rows = [{**row, "rewards/format/mean": 0.999, "rewards/format/std": 0.03} for row in run.metrics]
    assert findings(replace(run, config=composed("+reward=format"), metrics=rows)) == []


def evaluated(run, before, after, samples=200):
    parts = {
        when: {"accuracy": accuracy, "samples": samples} for when, accuracy in (("before", before), ("after", after))
    }
    return replace(run, evaluation=parts)


def test_a_rise_of_the_accuracy_outweighs_a_flat_reward(recorded):
    run = recorded("reward_flat")
    assert {finding.name for finding in findings(evaluated(run, 0.11, 0.2))} == set()
    assert {finding.name for finding in findings(evaluated(run, 0.11, 0.12))} == {"reward_flat"}
    assert {finding.name for finding in findings(evaluated(run, 0.11, 0.2, samples=20))} == {"reward_flat"}


def test_a_fallen_accuracy_is_reported_once(recorded):
    run = recorded("reward_flat")
    (fell, flat) = findings(evaluated(run, 0.3, 0.1))
    assert (fell.name, flat.name) == ("accuracy_fell", "reward_flat")
    assert fell.evidence == "30.0% before, 10.0% after, of 200 problems"
    assert "accuracy_fell" not in {finding.name for finding in findings(recorded("reward_fell"))}
    assert "accuracy_fell" not in {finding.name for finding in findings(recorded("hacking"))}


def test_a_run_too_short_to_tell_says_what_it_would_show(recorded):
    noise = [0.1, 0.9, 0.3, 0.7, 0.2, 0.8]
    run = with_metrics(
        recorded("reward_flat"),
        **{"rollout/reward": lambda step: noise[step % 6], "reward": lambda step: noise[step % 6]},
    )
    run = replace(run, metrics=run.metrics[:14], summary={"status": "completed"})
    (finding,) = [finding for finding in findings(run) if finding.name.startswith(("too_few", "reward"))]
    assert finding.name == "too_few_steps"
    assert finding.evidence.startswith("14 logged steps; only a rise of 0.")
    (finding,) = [
        finding for finding in findings(replace(run, metrics=run.metrics[:4])) if finding.name == "too_few_steps"
    ]
    assert finding.evidence == "4 logged steps; at least 10 are needed"
    running = replace(run, summary={})
    assert "too_few_steps" not in {finding.name for finding in findings(running)}


def test_answers_that_get_better_are_no_hacking(recorded):
    run = recorded("hacking")
    better = {"accuracy": 0.5, "samples": 200, "interval": [0.43, 0.57]}
    healed = replace(run, evaluation={**run.evaluation, "after": better})
    assert "hacking" not in {finding.name for finding in findings(healed)}


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 9])
@pytest.mark.parametrize("name", ["healthy", "hacking", "kl_exploded", "memory_near_limit"])
def test_a_run_of_a_few_steps_has_no_trend(name, steps, recorded):
    run = recorded(name)
    trends = {"reward_flat", "reward_fell", "groups_equal", "too_easy", "too_hard", "cut_off", "entropy_collapsed"}
    short = replace(run, metrics=run.metrics[:steps], evaluation={})
    assert not {finding.name for finding in findings(short)} & {*trends, "hacking"}


def test_memory_near_the_limit_of_a_gpu_is_reported_in_numbers(recorded):
    run = recorded("healthy")
    full = replace(run, summary={**run.summary, "memory/peak_allocated_gb": 15.2}, plan={"capacity_gb": 16.0})
    (finding,) = findings(full)
    assert finding.evidence == "15.2 GiB of 16.0 GiB of GPU memory used"


def test_an_update_that_ran_out_of_memory_is_reported(recorded):
    run = recorded("healthy")
    rows = [{**row, "update/oom_retries": int(row["step"] == 7)} for row in run.metrics]
    (finding,) = findings(replace(run, metrics=rows))
    assert finding.evidence == "1 updates ran out of memory and were repeated with smaller micro-batches"


@pytest.mark.parametrize(
    ("metrics", "found", "evidence"),
    [
        ({"tools/search/calls": lambda step: 5.0 if step < 20 else 0.0}, "never_called", "search was called before"),
        ({"tools/search/calls": lambda step: 5.0}, None, ""),
        ({"tools/failure_frequency": lambda step: 0.3}, "tools_fail", "30% of the calls in the last quarter"),
        ({"tools/failure_frequency": lambda step: 0.05}, None, ""),
        ({"tools/unanswered": lambda step: 0.5}, "turns_used_up", "50% of those in the last quarter"),
        ({"tools/unanswered": lambda step: 0.01}, None, ""),
    ],
)
def test_what_goes_wrong_with_tools_is_reported(metrics, found, evidence, recorded):
    report = findings(with_metrics(recorded("healthy"), **metrics))
    assert [finding.name for finding in report] == ([found] if found else [])
    assert all(evidence in finding.evidence for finding in report)


@pytest.mark.parametrize(("share", "found"), [(1.0, True), (0.9, False)])
def test_dynamic_sampling_without_equal_rewards_is_reported(share, found, recorded):
    run = with_metrics(recorded("healthy"), **{"rollout/informative_share": lambda step: share})
    assert findings(run) == []  # without dynamic sampling
    run.config.rollout.dynamic_sampling = True
    assert [finding.name for finding in findings(run)] == ["never_equal"] * found
