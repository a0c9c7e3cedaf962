"""The expected time of a step beside measured ones, and what it has to follow."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from omegaconf import DictConfig

from grpo.planning import duration
from grpo.planning.duration import OFF_BY, Duration, Speed, expected_duration, operations
from grpo.planning.fit import make_plan
from grpo.planning.from_config import find_shape
from grpo.utils.spoken import spoken
from tests.gpu_profiles import NAMES

Compose = Callable[..., DictConfig]
MACHINE = Speed(operations=122e9, bandwidth=24.0e9)
"""Two cores of an Intel Xeon, as `speed_of_cpu` read them in the minute of the measurements below."""
SMOLLM2 = ("model=smollm2_135m", "task=sums", "peft=lora", "peft.r=32", "train.gradient_checkpointing=false")
MEASURED: dict[tuple[str, ...], dict[str, float]] = {
    (): {"step": 0.30, "generation": 0.14, "update": 0.16},
    (*SMOLLM2, "train.bf16=false", "train.per_device_train_batch_size=128", "train.num_generations=8"): {
        "step": 4.0,
        "generation": 1.9,
        "update": 2.1,
    },
}
"""Medians of seconds per step of the demo (30 steps) and of the experiment smollm2 (6), nothing else running."""


def expected(config: DictConfig) -> Duration:
    found = expected_duration(config, make_plan(config))
    assert found
    return found


@pytest.mark.parametrize("overrides", MEASURED, ids=["demo", "smollm2"])
def test_the_estimate_for_a_cpu_is_within_its_own_range(
    composed: Compose, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
) -> None:
    monkeypatch.setattr(duration, "speed_of_cpu", lambda: MACHINE)
    found = expected(composed(*overrides, "train.use_cpu=true"))
    seconds = MEASURED[overrides]
    for name, value in {"step": found.step, **found.phases}.items():
        assert seconds[name] / OFF_BY["cpu"] <= value <= seconds[name] * OFF_BY["cpu"], name
    assert found.compared


def test_a_server_generating_during_updates_costs_the_remainder(composed: Compose) -> None:
    line = ("+gpu=h100", "generation=vllm_server", "model=qwen2_5_1_5b")
    for length in (64, 4096):  # with updates longer than generations, and the other way round
        overrides = (*line, f"train.max_completion_length={length}")
        one, other = (expected(composed(*overrides, f"engine.staleness={age}")) for age in (0, 1))
        assert other.step == pytest.approx(max(one.phases["generation"], one.step - one.phases["generation"]))


def test_a_run_takes_its_steps_and_evaluations_and_costs_hourly(composed: Compose) -> None:
    line = ("+gpu=h100", "train.max_steps=100")
    found = expected(composed(*line, "plan.hourly_price=3"))
    assert found.run == pytest.approx(100 * found.step + found.evaluation + duration.COMPILING)
    content = found.as_dict()
    assert content["cost"] == pytest.approx(found.run / 3600 * 3)
    assert content["run_s_range"] == [found.run / OFF_BY["cuda"], found.run * OFF_BY["cuda"]]
    assert str(found).endswith("; generation compared with one run on one GPU")
    assert ", cost " in str(found)
    assert "cost" not in expected(composed(*line)).as_dict()


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        ((), 160),
        (("train.max_steps=7",), 7),
        (("train.num_generations=16",), 320),
        (("train.num_iterations=2",), 320),
        (("task=gsm8k",), None),
    ],
)
def test_the_number_of_steps_is_known_where_the_data_is(composed: Compose, overrides: Any, steps: int | None) -> None:
    assert duration.number_of_steps(composed(*overrides)) == steps


@pytest.mark.parametrize(
    ("change", "phase", "low", "high"),
    [
        (("train.max_completion_length=2048",), "generation", 1.8, 2.6),
        (("train.gradient_accumulation_steps=16",), "update", 1.8, 2.2),
        (("train.gradient_checkpointing=false",), "update", 0.6, 0.8),  # two passes of three
        (("peft=none",), "update", 1.2, 1.5),  # four passes of three
        (("update.mlp_tile=4096",), "update", 1.15, 1.3),  # two thirds of a fourth pass
        (("peft=qlora",), "generation", 1.03, 1.2),  # each token dequantizes the weights
        (("generation=vllm_colocate",), "generation", 0.05, 0.7),
    ],
)
def test_the_time_follows_the_work(composed: Compose, change: Any, phase: str, low: float, high: float) -> None:
    line = ("+gpu=h100", "model=qwen2_5_1_5b", "generation=transformers", "train.max_completion_length=1024")
    before, after = expected(composed(*line)), expected(composed(*line, *change))
    assert low <= after.phases[phase] / before.phases[phase] <= high


def test_a_token_takes_two_operations_per_weight(composed: Compose) -> None:
    shape = find_shape(composed("model=llama3_2_1b").model)
    assert operations(shape, 0) == pytest.approx(2 * shape.parameters(), rel=0.01)
    assert operations(replace(shape, num_hidden_layers=32), 4096) > operations(shape, 4096)


def test_every_gpu_profile_gives_a_time_and_an_unknown_gpu_none(composed: Compose) -> None:
    without = [profile for profile in NAMES if not duration.speed_of_gpu(composed(f"+gpu={profile}"))]
    assert without == ["any", "apple"]
    config = composed("+gpu=any")
    assert expected_duration(config, make_plan(config)) is None


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.53, "0.53 s"), (42.0, "42 s"), (119.0, "119 s"), (150.0, "2.5 min"), (4.2e5, "117 h")]
)
def test_times_are_in_the_unit_that_people_use(seconds: float, text: str) -> None:
    assert spoken(seconds) == text


def test_a_run_without_an_evaluation_has_a_time(composed: Compose) -> None:
    assert expected(composed("task.eval.size=0")).evaluation == 0.0


def test_layers_are_compiled_where_updates_take_longer_than_that(composed: Compose) -> None:
    line = ("+gpu=h100", "model=qwen3_8b", "generation=transformers")
    for overrides, compiles in (
        ((*line, "train.max_steps=1000"), True),
        ((*line, "train.max_steps=1"), False),
        ((*line, "train.max_steps=1", "update.compile=true"), True),
        ((*line, "train.max_steps=1000", "update.compile=false"), False),
        ((*line, "train.max_steps=1000", "shard=fsdp2", "launch.processes=8"), False),
    ):
        found = expected(composed(*overrides))
        assert found.compiles == compiles, overrides
        assert found.run == pytest.approx(found.steps * found.step + found.evaluation + 60 * compiles)
        assert ("compiling in 60 s" in str(found)) == compiles
