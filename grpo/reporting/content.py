"""Everything that the page of a run states, as data: the page, `report.json` and the text are made of it."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from grpo.reporting.completions import sample
from grpo.reporting.curves import PHASES, constants, curves_of
from grpo.reporting.findings import findings
from grpo.reporting.findings.base import values
from grpo.reporting.images import coordinates
from grpo.reporting.listing import row_of
from grpo.reporting.problems import problems_of
from grpo.reporting.quotes import quotes
from grpo.reporting.tiles import tiles_of
from grpo.rundir.run_dir import Run
from grpo.utils.diagnosis import sampling_filters
from grpo.utils.spoken import spoken

VERSION = 1
"""Version of the layout of `report.json`."""


def content_of(run: Run, browse: dict[str, Any], problems: dict[str, Any]) -> dict[str, Any]:
    """Return the content of `report.json`, see docs/report.md.

    Args:
        run: as its directory shows it.
        browse: its completions, as of `completions_of`.
        problems: its problems, as of `followed`.
    """
    curves = curves_of(run)
    return {
        "version": VERSION,
        "title": f"GRPO run {'/'.join(run.folder.resolve().parts[-2:])}",
        "heading": heading(run),
        "status": run.status,
        "reason": run.reason,
        "evaluation": run.evaluation,
        "tiles": [asdict(tile) for tile in tiles_of(run)],
        "findings": [asdict(finding) | {"completions": quotes(finding.name, browse)} for finding in findings(run)],
        "settings": {name: text for name, text in settings(run).items() if text},
        "command": run.command,
        "memory_gib": [dict(zip(("phase", "planned", "used"), row, strict=True)) for row in memory(run)],
        "curves": [asdict(curve) for curve in curves],
        "constants": list(constants(curves).values()),
        "steps": len(run.metrics),
        "grader": run.grader,
        "problems": problems | {"problems": [in_table(problem) for problem in problems["problems"]]},
    }


def heading(run: Run) -> dict[str, str]:
    """Return model, task, steps, duration and date of a run, as text."""
    row = row_of(run.folder)
    steps, planned = run.summary.get("steps", len(run.metrics)), run.config.train.get("max_steps") or 0
    of_planned = f"{steps:,} of {planned:,} steps" if planned > steps else f"{steps:,} step{'s' * (steps != 1)}"
    seconds = run.summary.get("wall_time_s") or run.seconds
    return {
        "model": row["model"] or Path(run.config.model.model_name_or_path).name,
        "task": row["task"],
        "steps": of_planned,
        "duration": spoken(seconds) if seconds else "",
        "date": row["date"],
    }


def in_table(problem: dict[str, Any]) -> dict[str, Any]:
    """Return a problem as the table shows it, without completions."""
    times = [(time["step"], time["value"], time["size"]) for time in problem["times"]]
    return {key: problem[key] for key in ("number", "name", "asked", "solved", "forgotten")} | {"times": times}


def completions_of(run: Run) -> dict[str, Any]:
    """Return the completions of a run's page."""
    return sample(run.folder, weights_of(run), run.grader, coordinates(run.config.reward))


def followed(run: Run) -> dict[str, Any]:
    """Return the problems of a run through its steps."""
    train = run.config.train
    steps, every = train.gradient_accumulation_steps, train.steps_per_generation
    reused = train.num_iterations > 1 or (every or steps) > steps
    return problems_of(run.folder, weights_of(run), run.grader, reused)


def weights_of(run: Run) -> dict[str, float]:
    """Return the weights of a run's rewards by their names."""
    return {str(name): float(reward.get("weight", 1.0)) for name, reward in run.config.reward.items()}


def settings(run: Run) -> dict[str, str]:
    """Return the settings and results of a run by name, as text."""
    config, train = run.config, run.config.train
    data = {key: run.summary.get("data", {}).get(key, {}).get("used") for key in ("train", "held_out")}
    rewards = [f"{name} × {reward.get('weight', 1.0):g}" for name, reward in config.reward.items()]
    trained = f"LoRA, r={config.peft.r}" if config.peft else "all weights"
    trained += f" on {config.peft.quantization}" if config.peft and config.peft.get("quantization") else ""
    tools = [*config.task.get("tools", ()), *filter(None, [config.task.get("environment")])]
    return {
        "model": f"{config.model.model_name_or_path} ({config.model.dtype})",
        "trained": trained,
        "continues": run.summary.get("continues") or "",
        "task": "; ".join(f"{name}: {options_of(task)}".removeprefix(": ") for name, task in run.tasks.items()),
        "prompts by task": ", ".join(f"{name} × {of.weight:g}" for name, of in config.task.get("tasks", {}).items()),
        "problems": ", ".join(f"{count} {key.replace('_', ' ')}" for key, count in data.items() if count is not None),
        "rewards": ", ".join(rewards),
        "tools": ", ".join(tools),
        "loss": f"{train.loss_type}, advantages scaled by {train.scale_rewards}, beta {train.beta:g}",
        "per step": f"{run.completions_a_step} completions in groups of {train.num_generations}",
        "completions": f"up to {train.max_completion_length} tokens",
        "optimizer": f"{run.optimizer}, rate {train.learning_rate:g} ({train.lr_scheduler_type})",
        "generation": f"vLLM, {train.vllm_mode}" if train.use_vllm else "transformers",
        "engine check": engine_check(run),
        "machine": run.plan.get("device", ""),
        "steps": str(run.summary.get("steps", len(run.metrics))),
        "time of all steps": f"{run.seconds:,.0f} s",
        "tokens per second": f"{run.tokens_per_second or 0:,.0f}, of prompts and completions",
        "versions": ", ".join(f"{name} {version}" for name, version in run.summary.get("versions", {}).items()),
        "commit": run.summary.get("git_commit") or "",
    }


def options_of(task: DictConfig) -> str:
    """Return the options of a task's data that are set, as text."""
    return ", ".join(f"{key}={value}" for key, value in task.dataset.items() if value)


def engine_check(run: Run) -> str:
    """Return how many checks have found that the engine is the policy; nothing without an engine."""
    verdicts = [is_policy for _, is_policy in values(run, "engine/is_policy")]
    train = run.config.train
    if not verdicts:
        uncorrected = train.use_vllm and not train.vllm_importance_sampling_correction
        filters = sampling_filters(train) if uncorrected else []
        return f"none, as train.{filters[0]} changes the engine's log-probabilities alone" if filters else ""
    largest = max(difference for _, difference in values(run, "engine/logp_difference"))
    limit = values(run, "engine/tolerance")[-1][1]
    passed = f"{sum(map(bool, verdicts))} of {len(verdicts)} passed"
    return f"{passed}, largest difference {largest:.2g} nats per token, below {limit:g} is rounding"


def memory(run: Run) -> list[tuple[str, float | None, float | None]]:
    """Return the phases with planned and measured memory, GiB; None where one is not known."""
    planned = run.summary.get("planned_gb") or {}
    measured = {phase: run.summary.get(f"memory/{phase}_gb") for phase in PHASES}
    rows = [(phase, planned.get(phase), measured[phase]) for phase in PHASES if phase in planned or measured[phase]]
    return [("peak", planned.get("peak"), run.peak_gb), *rows] if rows or run.peak_gb else []
