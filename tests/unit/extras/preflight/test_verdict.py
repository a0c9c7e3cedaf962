from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from omegaconf import DictConfig
from transformers import AutoTokenizer

from grpo.config.schema import ROOT
from grpo.extras.preflight.cost import measured, ratios, steps_of, time_and_cost
from grpo.extras.preflight.estimators import Estimate, table_of
from grpo.extras.preflight.first_step import FirstStep, Step
from grpo.extras.preflight.groups import Prospect, Prospects, best, completions_per_step, filled
from grpo.extras.preflight.problems import begins_thought, duplicates, questions, template_warning
from grpo.extras.preflight.report import command
from grpo.extras.preflight.samples import Sample, Sampled
from grpo.extras.preflight.verdict import Evidence, judged, percent, suggestions
from grpo.options import Rollout
from grpo.planning.advice import Planner
from grpo.planning.duration import expected_duration
from grpo.planning.fit import make_plan
from grpo.trainer.rollout.completion import Completion
from grpo.trainer.rollout.dynamic_sampling import DynamicSampling
from grpo.trainer.rollout.problem_order import ProblemOrder

Compose = Callable[..., DictConfig]
REWARD = {"failed": {"value": 0.0}, "mean": {"value": 0.3}, "spread": 0.4, "lowest": 0.0, "varies": 0.8}
ZERO = REWARD | {"mean": {"value": 0.0}, "spread": 0.0, "varies": 0.0}


def prospect(fraction: float, size: int = 8, seconds: float | None = 1.0, groups: int = 16) -> Prospect:
    estimate = Estimate(fraction, fraction, fraction)
    return Prospect({}, size, estimate, fraction * groups * size, groups, seconds)


def verdict(fraction: float, **changes: Any) -> Any:
    given = {"steps": 100, "rewards": {"correctness": REWARD}, "accuracy": 0.3, "grader": "correctness"}
    return judged(Evidence(prospect(fraction), **(given | changes)))


@pytest.mark.parametrize(
    ("fraction", "changes", "learns", "reason"),
    [
        (0.43, {}, True, "will learn: 43 % of groups have non-zero variance"),
        (0.09, {}, True, "will learn slowly: 9.0 % of groups have non-zero variance"),
        (0.0, {"accuracy": 0.0}, False, "will probably not learn: 0 % of groups have non-zero variance; 0 % of comp"),
        (0.01, {"accuracy": 1.0}, False, "100 % of completions are correct"),
        (0.0, {"rewards": {"correctness": ZERO}}, False, "reward.correctness is 0 for every completion"),
        (0.4, {"truncated": 0.95, "masked": True}, False, "95 % of completions are truncated, and train.mask_trunc"),
        (0.4, {"truncated": 0.95}, True, "will learn: 40 % of groups have non-zero variance; 95 % of completions are"),
        (0.0, {"truncated": 0.95}, False, "; 95 % of completions are truncated"),
        (0.1, {"steps": 2}, False, "too short, 2 steps of 16 groups"),
        (0.4, {"agreement": Estimate(-0.5, -0.6, -0.4)}, False, "incorrect completions get the higher reward"),
        (0.4, {"agreement": Estimate(-0.1, -0.3, 0.1)}, True, "will learn"),
        (0.9, {"rewards": {"correctness": ZERO, "brevity": REWARD}}, False, "only brevity varies"),
        (0.9, {"rewards": {"correctness": ZERO | {"mean": None}, "brevity": REWARD}}, True, "will learn"),
        (0.4, {"rewards": {"x": REWARD | {"failed": {"value": 1.0}}}}, False, "reward.x failed on every completion"),
        (
            0.4,
            {"agreement": Estimate(-0.02, -0.07, 0.03), "grader": None},
            False,
            "correctness alone, correlation with correctness at most 0.03",
        ),
        (0.4, {"agreement": Estimate(0.02, -0.07, 0.11), "grader": None}, True, "will learn"),
        (0.4, {"agreement": Estimate(0.02, -0.07, 0.03)}, True, "will learn"),
        (0.4, {"agreement": Estimate(0.01, 0.0, 0.03), "grader": None, "accuracy": 0.01}, True, "will learn"),
        (0.4, {"rate": 0.0}, False, "will not learn: train.learning_rate=0"),
        (0.4, {"first_step": Step(0.1, None, 9.0)}, False, "train.learning_rate=0.1 moves the policy infinitely"),
        (0.4, {"first_step": Step(0.1, 2.5, 9.0)}, False, "moves the policy by 2.5 nats per token in the first"),
        (0.4, {"first_step": Step(1e-8, 1e-9, 1e-4)}, False, "1e-08 is too low for 100 steps: better completions"),
        (0.4, {"first_step": Step(1e-4, 1e-4, 0.1)}, True, "will learn"),
    ],
)
def test_each_way_not_to_learn_has_its_reason(fraction: float, changes: dict, learns: bool, reason: str) -> None:
    found = verdict(fraction, **changes)
    assert found.learns is learns
    assert reason in found.reason


def test_dynamic_sampling_fills_a_batch_as_the_trainer_does() -> None:
    random = np.random.default_rng(1)
    for fraction, rounds in ((0.1, 5), (0.3, 3), (0.9, 2), (0.0, 4)):
        kept = made = 0
        for _ in range(300):
            order = ProblemOrder(1000, 0, True)
            sampling = DynamicSampling(Rollout(True, rounds), order, 1, {"a": 1.0}, "a")

            def score(number: int, fraction: float = fraction) -> list:
                one = Completion(0, [], [], None, None, "", "", [1.0], {})
                return [([one], bool(random.random() >= fraction)) for _ in range(number)]

            _, metrics = sampling.fill(16, score)
            kept, made = kept + metrics["rollout/groups_kept"], made + metrics["rollout/groups_generated"]
        expected = (kept / (300 * 16), made / (300 * 16))
        assert filled(fraction, 16, rounds) == pytest.approx(expected, abs=0.04, rel=0.04)


def test_the_smallest_group_near_the_best_rate_is_chosen() -> None:
    rates = [prospect(fraction, size) for fraction, size in ((0.3, 2), (0.85, 8), (0.9, 16))]
    rates = [Prospect(one.change, one.num_generations, one.fraction, one.fraction.value, 1, 1.0) for one in rates]
    assert best(rates) is rates[1]
    assert best([prospect(0.0)]) is None


def test_prospects_are_planned_and_refused_as_a_run_is(composed: Compose) -> None:
    table = table_of([[0.0, 0.0, 0.0, 1.0]] * 20)
    prospects = Prospects(table, Planner(["train.per_device_train_batch_size=32"]), enforce=True)
    found = prospects.of({"train.num_generations": "4"})
    assert found is not None
    assert (found.fraction.value, found.groups, found.completions) == (1.0, 8, 32.0)
    assert prospects.of({"train.num_generations": "64"}) is None, "the batch has 32 completions"
    half = prospects.of({"train.num_generations": "2"})
    assert half is not None
    assert half.fraction.value == pytest.approx(0.5), "of the 6 pairs 3 differ"


def test_a_prospect_has_to_fit_unless_the_plan_is_not_enforced(composed: Compose) -> None:
    planner = Planner(["+gpu=rtx3080", "model=llama3_1_8b", "peft=none"])
    table = table_of([[0.0, 1.0]] * 4)
    assert Prospects(table, planner, enforce=True).of({}) is None
    assert Prospects(table, planner, enforce=False).of({}) is not None


def test_suggestions_give_more_groups_with_variance(composed: Compose) -> None:
    line = ["train.num_generations=2"]
    config = composed(*line)
    counts = table_of([[0.0] * 7 + [1.0]] * 30 + [[0.0] * 8] * 30)
    prospects = Prospects(counts, Planner(line), enforce=True)
    now = prospects.prospect({}, config, expected_duration(config, make_plan(config)))
    found = suggestions(prospects, config, now)
    assert found
    for one in found:
        keys = dict(word.split("=") for word in one["overrides"])
        again = prospects.of(keys)
        assert again is not None
        assert one["fraction"] == again.fraction.value >= 1.25 * now.fraction.value
    assert suggestions(prospects, config, prospect(0.6, 2)) == [], "enough"


def test_larger_groups_that_vary_no_more_are_not_suggested(composed: Compose) -> None:
    line = ["train.num_generations=2"]
    config = composed(*line)
    continuous = [[float(10 * number + one) for one in range(8)] for number in range(9)]
    prospects = Prospects(table_of([*continuous, *[[-1.0] * 8] * 11]), Planner(line), enforce=True)
    now = prospects.prospect({}, config, expected_duration(config, make_plan(config)))
    assert now.fraction.value == pytest.approx(0.45)
    found = suggestions(prospects, config, now)
    assert found
    assert all("rollout.dynamic_sampling=true" in one["overrides"] for one in found)


def test_dynamic_sampling_costs_the_generations_that_it_adds(composed: Compose) -> None:
    line = ["rollout.dynamic_sampling=true"]
    prospects = Prospects(table_of([[0.0] * 7 + [1.0]] * 20 + [[0.0] * 8] * 20), Planner(line), enforce=True)
    config = composed(*line)
    duration = expected_duration(config, make_plan(config))
    assert duration is not None
    found = prospects.prospect({}, config, duration)
    share, generated = filled(0.5, 16, 5)
    assert found.fraction.value == share > 0.9
    assert found.seconds == pytest.approx(duration.step + (generated - 1) * duration.phases["generation"])


def test_time_has_what_was_measured_and_the_rest_as_planned(composed: Compose) -> None:
    config = composed("plan.hourly_price=3.6", "train.max_steps=10")
    plan = make_plan(config)
    duration = expected_duration(config, plan)
    assert duration is not None
    completions = [Sample("", 1, True, {}, None)] * 4
    first = Sampled("a", 0, "", "", completions, {"generate": 100.0, "reward": 100.0}, first=True)
    later = Sampled("b", 1, "", "", completions, {"generate": 2.0, "reward": 0.4})
    seconds = measured(config, [first, later], FirstStep([]))
    assert seconds == pytest.approx({"generation": 128 * 0.5, "rewards": 128 * 0.1})
    assert measured(config, [first], FirstStep([]))["generation"] == 128 * 25
    content = time_and_cost(config, duration, seconds, 2560)
    step = 128 * 0.6 + duration.phases["update"]
    assert content["step_s"] == pytest.approx(step)
    evaluation = duration.evaluation * ratios(duration, seconds)["generation"]
    assert content["run_s"] == pytest.approx(10 * step + evaluation)
    assert content["cost"] == pytest.approx(content["run_s"] / 1000)
    timed = measured(config, [first, later], FirstStep([], seconds=0.2))
    assert timed["update"] == pytest.approx(128 * 0.2)
    assert time_and_cost(config, duration, timed, 2560)["step_s"] == pytest.approx(128 * 0.8)


def test_a_group_size_takes_its_planned_time_as_measured(composed: Compose) -> None:
    line = ["train.num_generations=8"]
    config = composed(*line)
    duration = expected_duration(config, make_plan(config))
    assert duration is not None
    table = table_of([[0.0, 0.0, 0.0, 1.0]] * 20)
    planned = Prospects(table, Planner(line), enforce=True).prospect({}, config, duration)
    seconds = {"generation": 3 * duration.phases["generation"], "update": duration.phases["update"] / 2}
    corrected = Prospects(table, Planner(line), True, ratios(duration, seconds), rewards=1.0)
    assert planned.seconds == pytest.approx(duration.step)
    assert corrected.prospect({}, config, duration).seconds == pytest.approx(sum(seconds.values()) + 1)


def test_a_group_size_takes_the_time_of_what_its_update_computes(composed: Compose) -> None:
    """Groups of 2 vary half as often as those of 8 here: the update skips the others, unless a KL penalty acts."""
    table, update = table_of([[0.0] * 7 + [1.0]] * 20), {"update": 1.0}
    for penalty, share in (("0", 0.25), ("0.1", 1.0)):
        line = ["train.num_generations=8", f"train.beta={penalty}"]
        prospects = Prospects(table, Planner(line), enforce=False, lengths=(30.0, 12.0))
        smaller = prospects.planner.config({"train.num_generations": "2"})
        duration = expected_duration(smaller, make_plan(smaller), prospects.lengths)
        assert duration is not None
        only_update = replace(duration, phases={"generation": 0.0} | update)
        assert prospects.prospect({}, smaller, only_update).seconds == pytest.approx(share, abs=0.01)


def test_known_lengths_take_the_place_of_limits_in_the_time(composed: Compose) -> None:
    config = composed("train.max_completion_length=400", "task.max_prompt_length=400")
    plan = make_plan(config)
    long, short = (expected_duration(config, plan, lengths) for lengths in (None, (40.0, 20.0)))
    assert long is not None
    assert short is not None
    assert short.phases["update"] < long.phases["update"] / 2
    assert short.phases["generation"] < long.phases["generation"] / 2


def test_a_few_large_groups_tell_less_than_many_small_ones() -> None:
    many, few = prospect(0.9, 8, groups=16), prospect(1.0, 32, groups=4)
    assert few.completions > many.completions
    assert few.effective < many.effective < many.completions
    assert best([many, few]) is many


def test_steps_follow_from_the_problems_that_are_there(composed: Compose) -> None:
    config = composed("task.dataset.generator=null", "train.num_train_epochs=2", "train.gradient_accumulation_steps=2")
    assert completions_per_step(config) == 256
    assert steps_of(config, 320) == 20
    assert steps_of(composed("train.max_steps=7"), 320) == 7


def test_the_command_has_the_changes_and_none_of_ours() -> None:
    typed = ["+gpu=any", "train.num_generations=4", "preflight.problems=8", "task.system_prompt='a b'"]
    found = command(typed, [{"overrides": ["train.num_generations=16", "rollout.dynamic_sampling=true"]}])
    assert found.startswith("python -m grpo.train +gpu=any ")
    assert "num_generations=4 " not in found
    assert found.endswith("train.num_generations=16 rollout.dynamic_sampling=true")
    assert "preflight" not in found


def test_duplicates_are_found_whatever_their_punctuation() -> None:
    train = questions(["How many, Ann?", "how many ann", "Two?", [{"role": "user", "content": "Three!"}]])
    assert duplicates(train, questions(["three", "four"])) == {"held_out": 1, "within": 1}


@pytest.mark.parametrize(
    ("name", "conversational", "warned"),
    [
        ("Qwen/Qwen3-4B-Base", True, "base model"),
        ("google/gemma-3-1b-pt", True, "base model"),
        ("Qwen/Qwen2.5-3B-Instruct", False, "instruct model"),
        ("google/gemma-3-1b-it", False, "instruct model"),
        ("Qwen/Qwen2.5-3B-Instruct", True, None),
        ("Qwen/Qwen3-4B-Base", False, None),
        ("a-database-of/criticisms", True, None),
    ],
)
def test_a_template_that_does_not_suit_a_model_is_a_warning(name: str, conversational: bool, warned: str) -> None:
    found = template_warning(name, conversational, True)
    assert (warned in (found or "")) if warned else found is None


def test_percentages_have_a_decimal_where_they_are_small() -> None:
    assert [percent(one) for one in (0.0, 0.004, 0.09, 0.31, 1.0)] == ["0 %", "0.4 %", "9.0 %", "31 %", "100 %"]


def test_a_thought_that_the_template_begins_is_seen() -> None:
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "grpo" / "builtin" / "tiny_calculator")
    asked = [{"role": "user", "content": "How many?"}]
    for end, begins in (("<think>\n", True), ("<think>\n\n</think>\n", False), ("", False)):
        tokenizer.chat_template = f"{{{{ messages[0].content }}}}{{% if add_generation_prompt %}}{end}{{% endif %}}"
        assert begins_thought(tokenizer, asked) is begins
    assert begins_thought(tokenizer, "A plain prompt <think>")
