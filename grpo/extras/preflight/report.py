"""The report of a preflight: everything that the samples say of a run, as data."""

import shlex
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from omegaconf import DictConfig

from grpo.config.batch import processes
from grpo.data.rewards import grader_of
from grpo.extras.preflight import answers, rewards
from grpo.extras.preflight.cost import measured, ratios, steps_of, time_and_cost
from grpo.extras.preflight.estimators import Estimate, mean_of_problems, table_of
from grpo.extras.preflight.groups import Prospects, best
from grpo.extras.preflight.learning_rate import rates_of, suggestion
from grpo.extras.preflight.samples import Sampled
from grpo.extras.preflight.sampling import Result
from grpo.extras.preflight.verdict import Evidence, judged, suggestions
from grpo.planning.advice import Planner
from grpo.planning.duration import expected_duration
from grpo.planning.fit import Plan
from grpo.rundir.history import name_of
from grpo.utils.errors import ConfigError

OURS = ("preflight.", "hydra.run.dir=")
"""Overrides that a run does not need."""


def report(
    result: Result, config: DictConfig, overrides: Sequence[str], plan: Plan | None, flags: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the content of `preflight.json`.

    Args:
        result: of `grpo.extras.preflight.sampling.sample`.
        config: of the run.
        overrides: from which Hydra has composed it.
        plan: None if the run cannot be planned.
        flags: of the command line, by which Hydra finds the user's configurations.
    """
    problems, train = result.problems, config.train
    weights = weights_of(config)
    outcomes = rewards.outcomes(problems, weights, train.multi_objective_aggregation)
    tokens = mean_lengths(problems)
    duration = expected_duration(config, plan, tokens) if plan else None
    here = plan is None or (plan.here and processes(config) == 1)
    seconds = measured(config, problems, result.first_step) if here else {}
    corrections = ratios(duration, seconds) if duration else {}
    planner, enforce = Planner(overrides), config.plan.enforce
    prospects = Prospects(table_of(outcomes), planner, enforce, corrections, seconds.get("rewards", 0.0), tokens)
    now = prospects.prospect({}, config, duration)
    accuracy, of_each = rewards.accuracy(problems), rewards.of_each(problems)
    lengths = answers.lengths(problems, train.max_completion_length, result.facts["begins_thought"])
    used, grader = result.facts["counts"]["train"]["used"], config.task.eval.reward
    agreement = agreement_of(problems, weights)
    steps, rate = steps_of(config, used), train.learning_rate
    evidence = Evidence(
        now,
        steps,
        of_each,
        accuracy["value"] if accuracy else None,
        lengths["truncated"]["value"],
        bool(train.mask_truncated_completions),
        grader if grader in weights else None,
        agreement,
        rate,
        result.first_step.at(rate),
    )
    verdict = judged(evidence)
    of_groups = suggestions(prospects, config, now) if verdict.lacks_groups else []
    of_rate = suggestion(result.first_step, rate, steps)
    verdict.suggestions = of_groups + of_rate
    return {
        "verdict": str(verdict),
        "learns": verdict.learns,
        "suggestions": verdict.suggestions,
        "command": command([*flags, *overrides], of_groups[:1] + of_rate),
        "task": name_of(config.task),
        "problems": len(problems),
        "samples": config.preflight.samples,
        **result.facts,
        "accuracy": accuracy,
        "reward": total_of(problems, weights),
        "rewards": of_each,
        "agreement": agreement and agreement.as_dict(),
        "contradictions": rewards.contradictions(problems),
        "disagreements": rewards.disagreements(problems),
        "now": now.as_dict(),
        "groups": by_size(prospects, train.num_generations),
        "lengths": lengths,
        "answers": answers.places(problems, answers.kinds_of(options_of_grader(config))),
        "ended": answers.fraction(problems, lambda completion: completion.ended),
        "learning_rate": rates_of(result.first_step, rate, steps),
        "time": time_and_cost(config, duration, seconds, used),
    }


def weights_of(config: DictConfig) -> dict[str, float]:
    """Return the weight of each reward."""
    return {str(name): float(reward.get("weight", 1.0)) for name, reward in config.reward.items()}


def mean_lengths(problems: Sequence[Sampled]) -> tuple[float, float] | None:
    """Return the mean tokens of prompts and of completions; None if those of a prompt are not known."""
    if not all(problem.prompt_tokens for problem in problems):
        return None
    of_completions = [completion.tokens for problem in problems for completion in problem.completions]
    return fmean(problem.prompt_tokens for problem in problems), fmean(of_completions)


def total_of(problems: Sequence[Sampled], weights: dict[str, float]) -> dict[str, Any] | None:
    """Return the mean of the total reward over problems, with its interval; None without any."""
    totals = [[rewards.total(completion, weights) for completion in problem.completions] for problem in problems]
    known = [[value for value in row if value is not None] for row in totals]
    return mean_of_problems([fmean(row) for row in known if row]).as_dict() if any(known) else None


def agreement_of(problems: Sequence[Sampled], weights: dict[str, float]) -> Estimate | None:
    """Return the correlation of the total reward with correctness within problems."""
    pairs = [
        [
            (rewards.total(completion, weights), float(completion.correct))
            for completion in p.completions
            if completion.correct is not None
        ]
        for p in problems
    ]
    return rewards.correlation([[(a, b) for a, b in row if a is not None] for row in pairs])


def by_size(prospects: Prospects, configured: int) -> list[dict[str, Any]]:
    """Return a row per group size: the fraction with non-zero variance and, if the size can run, its prospect."""
    rows = prospects.by_size(configured)
    chosen = best([prospect for _, _, prospect in rows if prospect])
    return [
        {
            "num_generations": size,
            "fraction": fraction.as_dict(),
            "prospect": prospect and prospect.as_dict(),
            "best": bool(chosen) and prospect is chosen,
        }
        for size, fraction, prospect in rows
    ]


def options_of_grader(config: DictConfig) -> dict[str, Any] | None:
    """Return the options of the grader; None where there is none."""
    name = config.task.eval.reward
    try:
        return grader_of(name, config.reward, config.train)[name]
    except ConfigError:
        return None


def command(overrides: Sequence[str], suggested: Sequence[dict[str, Any]]) -> str:
    """Return the command line of the run with suggestions."""
    words = [word for word in overrides if not word.lstrip("+").startswith(OURS)]
    changed = [word for suggestion in suggested for word in suggestion["overrides"]]
    keys = tuple(f"{word.partition('=')[0]}=" for word in changed)
    others = [word for word in words if not (keys and word.lstrip("+").startswith(keys))]
    return " ".join(["python -m grpo.train", *map(shlex.quote, [*others, *changed])])
