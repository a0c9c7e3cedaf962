"""Time and cost of a run. If this machine trains, generation, rewards and update are measured."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig

from grpo.extras.preflight.first_step import FirstStep
from grpo.extras.preflight.groups import completions_per_step
from grpo.extras.preflight.samples import Sampled
from grpo.planning.duration import Duration, number_of_steps


def measured(config: DictConfig, problems: Sequence[Sampled], first_step: FirstStep) -> dict[str, float]:
    """Return the seconds per step of the measured phases.

    The first batch of each call includes the warm-up and does not count if there are others.
    """
    counted = [problem for problem in problems if not problem.first] or list(problems)
    count, per_step = sum(len(problem.completions) for problem in counted), completions_per_step(config)
    names = {"generation": "generate", "rewards": "reward"}
    generated = per_step / config.train.num_iterations
    seconds = {
        phase: generated * sum(problem.seconds[key] for problem in counted) / count for phase, key in names.items()
    }
    return seconds | ({"update": per_step * first_step.seconds} if first_step.seconds else {})


def steps_of(config: DictConfig, problems: int) -> int:
    """Return the optimizer steps of a run.

    Args:
        problems: to train on.
    """
    train = config.train
    per_step = completions_per_step(config) / train.num_generations / train.num_iterations
    return number_of_steps(config) or max(1, int(train.num_train_epochs * problems / per_step))


def time_and_cost(
    config: DictConfig, duration: Duration | None, seconds: Mapping[str, float], used: int
) -> dict[str, Any]:
    """Return `phases_s` and, if known, `step_s`, `run_s` and `cost`, and the `measured` phases.

    Args:
        config: of the run.
        duration: time according to the plan; None if the plan has no time.
        seconds: of the measured phases.
        used: number of training problems.
    """
    phases = {**(duration.phases if duration else {}), **seconds}
    steps = steps_of(config, used)
    content: dict[str, Any] = {"phases_s": phases, "measured": list(seconds), "steps": steps}
    if duration is None:
        return content
    evaluation = duration.evaluation * ratios(duration, seconds).get("generation", 1.0)
    content |= {"step_s": (step := replace(duration, phases=phases).step), "run_s": step * steps + evaluation}
    if config.plan.hourly_price:
        content["cost"] = content["run_s"] / 3600 * config.plan.hourly_price
    return content


def ratios(duration: Duration, seconds: Mapping[str, float]) -> dict[str, float]:
    """Return measured by planned time of each phase that has both."""
    return {
        phase: seconds[phase] / planned for phase, planned in duration.phases.items() if planned and phase in seconds
    }
