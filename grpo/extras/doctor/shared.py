"""The findings of a run's page about a run of another trainer: its history in the shape that they read."""

from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
from omegaconf import OmegaConf

from grpo.extras.doctor.history import History, Row
from grpo.extras.doctor.signal import zero_variance
from grpo.reporting.findings import Finding, learning, machine, rewards
from grpo.rundir.run_dir import Run, with_zero_variance

RULES: tuple[Callable[[Run], Finding | None], ...] = (
    machine.mismatch,
    learning.kl_exploded,
    learning.entropy_collapsed,
    learning.groups_equal,
    learning.cut_off,
    learning.reward_flat,
    rewards.never_fired,
    rewards.drowned,
    rewards.tools_fail,
)
"""Rules of the page whose metrics other trainers log as well."""
ADVICE = {
    "mismatch": "weights that the engine does not get (a LoRA adapter, a failed synchronization), another precision, "
    "chat template or sampling filter than the trainer's; compare both on one prompt",
    "kl_exploded": "lower learning_rate, or raise beta",
    "entropy_collapsed": "lower learning_rate, raise temperature or epsilon_high (0.28), or set beta=0.01",
    "too_easy": "stop earlier, or take harder problems",
    "too_hard": "take easier problems first, show an example in the prompt, raise temperature or num_generations, or "
    "add a reward for partial success",
    "groups_equal": "if the completions of a group are alike, lower learning_rate or raise temperature; else take "
    "problems between always and never solved, or a reward that tells completions apart",
    "cut_off": "raise max_completion_length if they are close to an answer; if they ramble, penalize length or set "
    "mask_truncated_completions=True",
    "reward_flat": "raise learning_rate or num_generations, train longer, or read the completions: does the reward "
    "tell good from bad ones?",
    "never_fired": "try it on the completions of the run; the prompt may not ask for the format that it looks for",
    "drowned": "raise the smaller weight in reward_weights if that reward matters",
    "tools_fail": "read the first error of each tool: wrong arguments want a clearer docstring",
}
"""Advice in the words of any trainer, by the name of a finding; other findings are not reported."""


def findings(history: History) -> list[Finding]:
    """Return the findings of the page's rules about a history, with advice for any trainer."""
    weights = weights_of(history)
    run = as_run(history, weights or [1.0] * len(history.rewards))
    rules = [rule for rule in RULES if weights or rule is not rewards.drowned]
    return [
        Finding(finding.name, finding.title, finding.evidence.replace("train.", ""), ADVICE[finding.name])
        for rule in rules
        if (finding := rule(run)) and finding.name in ADVICE
    ]


def as_run(history: History, weights: list[float]) -> Run:
    """Return a history as a run of this project; of options that no log tells, only the advice there speaks."""
    lengths = [value for _, value in history.values("completions/max_length")]
    train = {
        "learning_rate": max((value for _, value in history.values("learning_rate")), default=0.0),
        "max_completion_length": f"{max(lengths):.0f}" if lengths else "?",
        **{"beta": 0.0, "num_generations": 8, "vllm_mode": "colocate"},
    }
    reward = {name: {"fn": "", "weight": weight} for name, weight in zip(history.rewards, weights, strict=True)}
    grader = grader_of(history).replace("${", "\\${")  # others' text, and no reference
    config = OmegaConf.create({"train": train, "reward": reward, "task": {"eval": {"reward": grader}}})
    exact = dict(zero_variance(history))
    steps = [with_zero_variance(finite(row)) for row in history.steps]
    steps = [row | ({"rollout/zero_variance": exact[row["step"]]} if row["step"] in exact else {}) for row in steps]
    return Run(Path(), config, [], metrics=steps)


def finite(row: Row) -> Row:
    """Return a step without missing and non-finite values."""
    return {name: value for name, value in row.items() if value is not None and np.isfinite(value)}


def grader_of(history: History) -> str:
    """Return the name of a reward that is 0 or 1, so that its mean is a fraction of the completions; empty without.

    Of values between 0 and 1, only zeros and ones have a variance of mean x (1 - mean).
    """
    for name in history.rewards:
        means, spreads = (dict(history.values(f"rewards/{name}/{kind}")) for kind in ("mean", "std"))
        ratios = [
            spreads[step] ** 2 / (mean * (1 - mean))
            for step, mean in means.items()
            if 0.02 < mean < 0.98 and step in spreads
        ]
        if ratios and all(0 <= mean <= 1 for mean in means.values()) and 0.95 < median(ratios) < 1.15:
            return name
    return ""


def weights_of(history: History) -> list[float] | None:
    """Return the weights of the reward functions, in the order of their names; None if they do not follow from the log.

    The mean reward is the weighted sum of the functions' means.
    """
    names = history.rewards
    means = {name: dict(history.values(f"rewards/{name}/mean")) for name in names}
    steps = [(step, value) for step, value in history.values("reward") if all(step in means[name] for name in names)]
    if not names or len(steps) < len(names) + 3:
        return None
    table = np.array([[means[name][step] for name in names] for step, _ in steps])
    totals = np.array([value for _, value in steps])
    weights, _, rank, _ = np.linalg.lstsq(table, totals, rcond=None)
    if rank < len(names) or np.abs(table @ weights - totals).max() > 1e-3 * np.abs(totals).max():
        return None
    return [round(float(weight), 4) for weight in weights]
