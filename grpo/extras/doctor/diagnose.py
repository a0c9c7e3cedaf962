"""All findings about a run, and the questions that its logs leave open."""

from collections.abc import Callable

from grpo.extras.doctor import completions, engine, shared, signal, updates
from grpo.extras.doctor.diagnosis import SEVERITIES, Diagnosis
from grpo.extras.doctor.history import History
from grpo.reporting.findings import findings as of_page
from grpo.rundir.run_dir import Run

RULES: tuple[Callable[[History], Diagnosis | None], ...] = (
    updates.learning_rate_zero,
    updates.gradient_not_finite,
    updates.gradient_zero,
    updates.gradient_exploded,
    updates.kl_dominates,
    updates.loss_zero,
    signal.reward_constant,
    signal.reward_missing,
    signal.zero_variance_missed,
    signal.collapse,
    engine.engine_gap,
    engine.engine_drifts,
    completions.identical,
    completions.length_only,
)
INFO = (
    "reward_flat",
    "too_easy",
    "drowned",
    "gpu_idle",
    "fragments",
    "memory_near_limit",
    "host_memory_grows",
    "never_equal",
)
"""Findings of the page that a good run may have."""
EXPLAINED = {
    "reward_constant": ("never_fired", "groups_equal", "too_hard", "too_easy", "reward_flat", "loss_zero"),
    "collapse": ("reward_fell", "reward_flat", "groups_equal", "too_hard"),
    "learning_rate_zero": ("reward_flat", "loss_zero"),
    "kl_dominates": ("reward_flat",),
    "engine_drifts": ("engine_gap", "mismatch"),
    "identical": ("groups_equal", "too_hard"),
    "mismatch": ("engine_gap",),
}
"""Findings that follow from another, which is reported in their place."""
QUESTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("reward", ("reward",)),
    ("zero-variance groups", ("frac_reward_zero_std", "rollout/zero_variance", "completions")),
    ("truncation", ("completions/clipped_ratio",)),
    ("learning rate", ("learning_rate",)),
    ("gradients", ("grad_norm",)),
    ("entropy", ("entropy", "update/entropy")),
    ("distance from the reference", ("kl",)),
    ("engine against policy", (*engine.GAPS, "engine/is_policy")),
    ("single rewards", ("rewards/",)),
    ("identical completions, and rewards by length", ("completions",)),
)
"""Questions, and the metrics, or tables of completions, any of which answers them."""


def diagnose(history: History, run: Run | None) -> list[Diagnosis]:
    """Return the findings about a run, the most severe first.

    Args:
        history: of the run.
        run: the run, if it is one of this project.
    """
    general = of_page(run) if run else shared.findings(history)
    diagnoses = [diagnosis for rule in RULES if (diagnosis := rule(history))]
    diagnoses += [
        Diagnosis(finding.name, finding.title, finding.evidence, finding.advice, severity_of(finding.name))
        for finding in general
    ]
    names = {diagnosis.name for diagnosis in diagnoses}
    explained = {name for cause, effects in EXPLAINED.items() if cause in names for name in effects}
    rest = [diagnosis for diagnosis in diagnoses if diagnosis.name not in explained]
    return sorted(rest, key=lambda diagnosis: SEVERITIES.index(diagnosis.severity))


def severity_of(name: str) -> str:
    """Return the severity of a finding of the page."""
    return "info" if name in INFO else "warning"


def open_questions(history: History) -> list[str]:
    """Return what could not be judged, with the missing metrics."""
    logged = {name for row in history.steps for name, value in row.items() if value is not None}
    questions = []
    for question, names in QUESTIONS:
        tables = "completions" in names and bool(history.completions)
        if not tables and not any(
            key == name or (name.endswith("/") and key.startswith(name)) for name in names for key in logged
        ):
            needed = "tables of completions" if names == ("completions",) else names[0].rstrip("/")
            questions.append(f"{question} ({needed})")
    if len(history.steps) < updates.LEAST:
        questions.append(f"trends: {len(history.steps)} logged steps, of the {updates.LEAST} that they need")
    return questions
