"""One self-contained page about a run, or about a sweep."""

import base64
import hashlib
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from grpo.config.batch import completions
from grpo.config.library import DEFAULT_OPTIMIZER
from grpo.reporting.charts import Chart, Points, accuracy_by_value, accuracy_curve, bars, curves
from grpo.reporting.completions import as_data, sample
from grpo.reporting.findings import findings
from grpo.reporting.findings.base import tools_of, values
from grpo.reporting.images import MAX_BYTES, MAX_IMAGES, coordinates
from grpo.rundir.run_dir import Run, read_run
from grpo.rundir.sweep_dir import COLUMNS, Sweep, is_sweep, read_sweep, show
from grpo.utils.atomic import atomic
from grpo.utils.diagnosis import sampling_filters

PAGE = "report.html"

PHASES = ("generate", "reward", "logprobs", "update")
"""Phases of a step, as in the names of metrics."""
PROBLEMS = {"solved": "solved", "learnable": "learnable", "out_of_reach": "out of reach"}
"""Names of metrics about the problems seen so far, and of their curves."""


def write_report(folder: Path) -> Path:
    """Write the page of a run, or of a sweep, into its directory; ConfigError if it holds neither."""
    page = sweep_page(read_sweep(folder)) if is_sweep(folder) else run_page(read_run(folder))
    file = folder / PAGE
    with atomic(file) as partial:
        partial.write_text(page, encoding="utf-8", errors="replace")
    return file


def run_page(run: Run) -> str:
    """Return the page of a run."""
    weights = {str(name): float(reward.get("weight", 1.0)) for name, reward in run.config.reward.items()}
    return page(
        "run.html.jinja",
        title=f"GRPO run {name_of(run.folder)}",
        run=run,
        findings=findings(run),
        facts=facts(run),
        memory=memory(run),
        charts=charts(run),
        browse=sample(run.folder, weights, coordinates(run.config.reward)),
        limits={"images": MAX_IMAGES, "bytes": MAX_BYTES},
    )


def name_of(folder: Path) -> str:
    """Return the last two parts of a path: date and time of a run or a sweep, time and number of a job."""
    return "/".join(folder.resolve().parts[-2:])


def facts(run: Run) -> dict[str, str]:
    """Return the settings and results of a run by name, as text."""
    config, train = run.config, run.config.train
    data = {key: run.summary.get("data", {}).get(key, {}).get("used") for key in ("train", "held_out")}
    batch = run.summary.get("completions_a_step", completions(train, 1))
    rewards = [f"{name} × {reward.get('weight', 1.0):g}" for name, reward in config.reward.items()]
    trained = f"LoRA, r={config.peft.r}" if config.peft else "all weights"
    trained += f" on {config.peft.quantization}" if config.peft and config.peft.get("quantization") else ""
    tools = [*config.task.get("tools", ()), *filter(None, [config.task.get("environment")])]
    return {
        "model": f"{config.model.model_name_or_path} ({config.model.dtype})",
        "trained": trained,
        "task": ", ".join(f"{key}={value}" for key, value in config.task.dataset.items()),
        "problems": ", ".join(f"{count} {key.replace('_', ' ')}" for key, count in data.items() if count is not None),
        "rewards": ", ".join(rewards),
        "tools": ", ".join(tools),
        "loss": f"{train.loss_type}, advantages scaled by {train.scale_rewards}, beta {train.beta:g}",
        "per step": f"{batch} completions in groups of {train.num_generations}",
        "completions": f"up to {train.max_completion_length} tokens",
        "optimizer": f"{train.optim or DEFAULT_OPTIMIZER}, rate {train.learning_rate:g} ({train.lr_scheduler_type})",
        "generation": f"vLLM, {train.vllm_mode}" if train.use_vllm else "transformers",
        "engine check": engine_check(run),
        "machine": run.plan.get("device", ""),
        "steps": str(run.summary.get("steps", len(run.metrics))),
        "time of all steps": f"{run.seconds:,.0f} s",
        "tokens per second": f"{run.tokens_per_second or 0:,.0f}, of prompts and completions",
        "versions": ", ".join(f"{name} {version}" for name, version in run.summary.get("versions", {}).items()),
        "commit": run.summary.get("git_commit") or "",
    }


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


def charts(run: Run) -> list[Chart]:
    """Return the charts of a run, without those of metrics that were not logged."""

    def lines(names: dict[str, str]) -> dict[str, Points]:
        return {label: points for label, name in names.items() if (points := values(run, name))}

    sampled = values(run, f"rewards/{run.grader}/mean")
    last = run.metrics[-1]["step"] if run.metrics else 0
    known = [(step, run.evaluation[when]) for when, step in (("before", 0), ("after", last)) if when in run.evaluation]
    held_out = [(step, part["accuracy"], *part["interval"]) for step, part in known]
    rewards = {str(name): f"rewards/{name}/mean" for name in run.config.reward}
    called = tools_of(run)
    entropy = max("entropy", "update/entropy", key=lambda name: len(values(run, name)))
    metrics: list[tuple[str, dict[str, str], bool]] = [
        ("Reward", {"reward": "reward"}, False),
        ("Reward functions", rewards if len(rewards) > 1 else {}, False),
        ("KL to the reference, nats per token", {"KL": "kl"}, False),
        ("Entropy, nats per token", {"entropy": entropy}, False),
        ("Completion length, tokens", {key: f"completions/{key}_length" for key in ("mean", "min", "max")}, False),
        ("Truncated completions", {"truncated": "completions/clipped_ratio"}, True),
        ("Zero-variance groups", {"groups": "frac_reward_zero_std"}, True),
        ("Groups of a step", {key: f"rollout/groups_{key}" for key in ("generated", "kept")}, False),
        ("Problems seen", {name: f"rollout/problems_{key}" for key, name in PROBLEMS.items()}, False),
        ("Tool calls of a step", {tool: f"tools/{tool}/calls" for tool in called}, False),
        ("Failed tool calls of a step", {tool: f"tools/{tool}/errors" for tool in called}, False),
        ("Completions without an answer after tool calls", {"completions": "tools/unanswered"}, True),
        ("Gradient norm", {"norm": "grad_norm"}, False),
        ("Learning rate", {"rate": "learning_rate"}, False),
        ("Skipped completions (zero advantage)", {"completions": "update/rows_skipped"}, False),
        ("Difference of vLLM's log-probabilities", {"nats": "sampling/sampling_logp_difference/mean"}, False),
        ("Time by phase, s/step", {phase: f"time/{phase}" for phase in ("data", *PHASES)}, False),
        ("GPU utilization", {"GPU": "gpu/utilization"}, True),
        ("Memory by phase, GiB", {phase: f"memory/{phase}_gb" for phase in (*PHASES, "host")}, False),
    ]
    drawings = [curves(title, drawn, percent=percent) for title, names, percent in metrics if (drawn := lines(names))]
    return ([accuracy_curve("Accuracy", sampled, held_out)] if sampled or held_out else []) + drawings


def sweep_page(sweep: Sweep) -> str:
    """Return the page of a sweep."""
    evaluated = [run for run in sweep.runs if run.accuracy is not None]
    best = max(evaluated, key=lambda run: (run.accuracy or 0, run.reward or 0), default=None)
    rivals = [run for run in evaluated if best and run is not best and interval(run)[2] >= interval(best)[1]]
    return page(
        "sweep.html.jinja",
        title=f"GRPO sweep {name_of(sweep.folder)}",
        sweep=sweep,
        columns=COLUMNS | {"completions per step": lambda run: show(run.summary.get("completions_a_step"), "{:,}")},
        best=best,
        rivals=rivals,
        charts=[chart for key in sweep.varied for chart in comparisons(sweep, key)],
    )


def comparisons(sweep: Sweep, key: str) -> list[Chart]:
    """Return the charts of memory and accuracy over the values of a key."""
    places: dict[str, list[Run]] = {}
    for run in sorted(sweep.runs, key=lambda run: order(sweep.value(run, key))):
        places.setdefault(sweep.value(run, key), []).append(run)
    peaks = {text: max((run.peak_gb for run in runs if run.peak_gb), default=None) for text, runs in places.items()}
    drawings = [bars(f"Peak memory over {key}, GiB", peaks, "GiB")]
    after = {text: [interval(run) for run in runs if run.accuracy is not None] for text, runs in places.items()}
    if any(after.values()):
        before = {run.evaluation["before"]["accuracy"] for run in sweep.runs if "before" in run.evaluation}
        common = before.pop() if len(before) == 1 else None
        drawings.append(accuracy_by_value(f"Held-out accuracy over {key}", after, common))
    return drawings


def interval(run: Run) -> tuple[float, float, float]:
    """Return the accuracy after training with its 95 % interval."""
    after = run.evaluation["after"]
    return (after["accuracy"], *after["interval"])


def order(text: str) -> tuple[bool, float, str]:
    """Return a sort key: numbers by size, then texts."""
    try:
        return False, float(text), ""
    except ValueError:
        return True, 0.0, text


def page(template: str, **content: Any) -> str:
    """Render a template. Content is escaped, and the page's policy allows no script but its own."""
    environment = Environment(
        loader=PackageLoader("grpo.reporting"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["data"] = as_data
    environment.filters["show"] = show
    script = environment.get_template("browse.js").render()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template(template).render(script=Markup(script), digest=digest, **content)
