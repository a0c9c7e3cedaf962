"""Time and cost of a run; generation and rewards are measured while sampling, if this machine trains."""

from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig

from grpo.config.batch import processes
from grpo.extras.preflight.groups import completions_per_step
from grpo.extras.preflight.samples import Sampled
from grpo.planning.duration import Duration, number_of_steps
from grpo.planning.fit import Plan


def measured(problems: Sequence[Sampled]) -> dict[str, float]:
    """Return seconds per completion of `generation` and `rewards`.

    The first batch of each call includes the warm-up and does not count if there are others.
    """
    counted = [problem for problem in problems if not problem.first] or list(problems)
    count = sum(len(problem.completions) for problem in counted)
    names = {"generation": "generate", "rewards": "reward"}
    return {phase: sum(problem.seconds[key] for problem in counted) / count for phase, key in names.items()}


def steps_of(config: DictConfig, problems: int) -> int:
    """Return the optimizer steps of a run.

    Args:
        problems: to train on.
    """
    train = config.train
    per_step = completions_per_step(config) / train.num_generations / train.num_iterations
    return number_of_steps(config) or max(1, int(train.num_train_epochs * problems / per_step))


def time_and_cost(
    config: DictConfig, plan: Plan | None, duration: Duration | None, problems: Sequence[Sampled], used: int
) -> dict[str, Any]:
    """Return `phases_s` and, if known, `step_s`, `run_s` and `cost`, and the `measured` phases.

    Args:
        plan: plan of the run; None if it could not be planned.
        duration: time according to the plan; None if the plan has no time.
        problems: number of sampled problems.
        used: number of training problems.
    """
    phases = dict(duration.phases) if duration else {}
    here = plan is None or (plan.here and processes(config) == 1)
    by_completion = measured(problems) if here else {}
    generated = completions_per_step(config) / config.train.num_iterations
    phases |= {phase: seconds * generated for phase, seconds in by_completion.items()}
    steps = steps_of(config, used)
    content: dict[str, Any] = {"phases_s": phases, "measured": list(by_completion), "steps": steps}
    if duration is None:
        return content
    step = sum(phases.values()) - (min(phases["generation"], duration.step) if duration.overlaps else 0.0)
    content |= {"step_s": step, "run_s": step * steps + duration.evaluation}
    if config.plan.hourly_price:
        content["cost"] = content["run_s"] / 3600 * config.plan.hourly_price
    return content
