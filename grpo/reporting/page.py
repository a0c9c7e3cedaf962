"""One page that shows a run, or a sweep, and needs nothing else."""

import base64
import hashlib
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from grpo.config.batch import completions
from grpo.config.library import DEFAULT_OPTIMIZER
from grpo.reporting.charts import Chart, Points, accuracies, bars, curves, shares
from grpo.reporting.completions import as_data, sample
from grpo.reporting.findings import findings
from grpo.reporting.findings.base import values
from grpo.runs.run_dir import Run, read_run
from grpo.runs.sweep_dir import COLUMNS, Sweep, is_sweep, read_sweep, show

PAGE = "report.html"

PHASES = ("generate", "reward", "logprobs", "update")


def write_report(folder: Path) -> Path:
    """Write the page of a run, or of a sweep, into its directory.

    Raises:
        ConfigError: it is neither.
    """
    page = sweep_page(read_sweep(folder)) if is_sweep(folder) else run_page(read_run(folder))
    file = folder / PAGE
    partial = file.with_suffix(".partial")
    partial.write_text(page, encoding="utf-8", errors="replace")
    partial.replace(file)
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
        browse=sample(run.folder, weights),
    )


def name_of(folder: Path) -> str:
    """Return the last two parts of a path: date and time of a run or a sweep, time and number of a job."""
    return "/".join(folder.resolve().parts[-2:])


def facts(run: Run) -> dict[str, str]:
    """Return what was trained on what and how, in the words of the configuration."""
    config, train = run.config, run.config.train
    data = {key: run.summary.get("data", {}).get(key, {}).get("used") for key in ("train", "held_out")}
    batch = run.summary.get("completions_a_step", completions(train, 1))
    rewards = [f"{name} × {reward.get('weight', 1.0):g}" for name, reward in config.reward.items()]
    adapter = f"LoRA, r={config.peft.r}" if config.peft else "all weights"
    return {
        "model": f"{config.model.model_name_or_path} ({config.model.dtype})",
        "trained": adapter
        + (f" on {config.peft.quantization}" if config.peft and config.peft.get("quantization") else ""),
        "task": ", ".join(f"{key}={value}" for key, value in config.task.dataset.items()),
        "problems": ", ".join(f"{count} {key.replace('_', ' ')}" for key, count in data.items() if count is not None),
        "rewards": ", ".join(rewards),
        "loss": f"{train.loss_type}, advantages scaled by {train.scale_rewards}, beta {train.beta:g}",
        "a step": f"{batch} completions, groups of {train.num_generations}, up to {train.max_completion_length} tokens",
        "optimizer": f"{train.optim or DEFAULT_OPTIMIZER}, rate {train.learning_rate:g} ({train.lr_scheduler_type})",
        "generation": f"vLLM, {train.vllm_mode}" if train.use_vllm else "transformers",
        "machine": run.plan.get("device", ""),
        "steps": str(run.summary.get("steps", len(run.metrics))),
        "time of its steps": f"{run.seconds:,.0f} s",
        "tokens a second": f"{run.tokens_per_second or 0:,.0f}, of prompts and completions",
        "versions": ", ".join(f"{name} {version}" for name, version in run.summary.get("versions", {}).items()),
        "commit": run.summary.get("git_commit") or "",
    }


def memory(run: Run) -> list[tuple[str, float | None, float | None]]:
    """Return phases with the GB that were planned and those that were read; None where one is not known."""
    planned = run.summary.get("planned_gb") or {}
    read = {phase: run.summary.get(f"memory/{phase}_gb") for phase in PHASES}
    rows = [(phase, planned.get(phase), read[phase]) for phase in PHASES if phase in planned or read[phase]]
    return [("peak", planned.get("peak"), run.peak_gb), *rows] if rows or run.peak_gb else []


def charts(run: Run) -> list[Chart]:
    """Return the pictures of a run; a metric that was not logged has none."""

    def lines(names: dict[str, str]) -> dict[str, Points]:
        return {label: points for label, name in names.items() if (points := values(run, name))}

    sampled = values(run, f"rewards/{run.judge}/mean")
    last = run.metrics[-1]["step"] if run.metrics else 0
    known = [(step, run.evaluation[when]) for when, step in (("before", 0), ("after", last)) if when in run.evaluation]
    held_out = [(step, part["accuracy"], *part["interval"]) for step, part in known]
    rewards = {str(name): f"rewards/{name}/mean" for name in run.config.reward}
    wanted: list[tuple[str, dict[str, str], bool]] = [
        ("Reward", {"reward": "reward"}, False),
        ("Reward functions", rewards if len(rewards) > 1 else {}, False),
        ("KL to the reference, nats a token", {"KL": "kl"}, False),
        (
            "Entropy, nats a token",
            {"entropy": max("entropy", "update/entropy", key=lambda name: len(values(run, name)))},
            False,
        ),
        ("Completion length, tokens", {key: f"completions/{key}_length" for key in ("mean", "min", "max")}, False),
        ("Completions cut off", {"cut off": "completions/clipped_ratio"}, True),
        ("Groups without a difference in reward", {"groups": "frac_reward_zero_std"}, True),
        ("Gradient norm", {"norm": "grad_norm"}, False),
        ("Learning rate", {"rate": "learning_rate"}, False),
        ("Rows that needed no update", {"rows": "update/rows_skipped"}, False),
        ("Difference of vLLM's log-probabilities", {"nats": "sampling/sampling_logp_difference/mean"}, False),
        ("Time by phase, s a step", {phase: f"time/{phase}" for phase in PHASES}, False),
        ("Memory by phase, GB", {phase: f"memory/{phase}_gb" for phase in (*PHASES, "host")}, False),
    ]
    found = [curves(title, drawn, percent=share) for title, names, share in wanted if (drawn := lines(names))]
    return ([accuracies("Right answers", sampled, held_out)] if sampled or held_out else []) + found


def sweep_page(sweep: Sweep) -> str:
    """Return the page of a sweep."""
    judged = [run for run in sweep.runs if run.accuracy is not None]
    best = max(judged, key=lambda run: (run.accuracy or 0, run.reward or 0), default=None)
    rivals = [run for run in judged if best and run is not best and interval(run)[2] >= interval(best)[1]]
    return page(
        "sweep.html.jinja",
        title=f"GRPO sweep {name_of(sweep.folder)}",
        sweep=sweep,
        columns=COLUMNS | {"completions a step": lambda run: show(run.summary.get("completions_a_step"), "{:,}")},
        best=best,
        rivals=rivals,
        charts=[chart for key in sweep.varied for chart in comparisons(sweep, key)],
    )


def comparisons(sweep: Sweep, key: str) -> list[Chart]:
    """Return the pictures of memory and accuracy over the values of a key."""
    places: dict[str, list[Run]] = {}
    for run in sorted(sweep.runs, key=lambda run: order(sweep.value(run, key))):
        places.setdefault(sweep.value(run, key), []).append(run)
    peaks = {text: max((run.peak_gb for run in runs if run.peak_gb), default=None) for text, runs in places.items()}
    found = [bars(f"Peak memory over {key}, GB", peaks, "GB")]
    after = {text: [interval(run) for run in runs if run.accuracy is not None] for text, runs in places.items()}
    if any(after.values()):
        before = {run.evaluation["before"]["accuracy"] for run in sweep.runs if "before" in run.evaluation}
        found.append(shares(f"Held-out accuracy over {key}", after, before.pop() if len(before) == 1 else None))
    return found


def interval(run: Run) -> tuple[float, float, float]:
    """Return the accuracy after training with its 95 % interval."""
    after = run.evaluation["after"]
    return (after["accuracy"], *after["interval"])


def order(text: str) -> tuple[bool, float, str]:
    """Return a key that sorts numbers by size, and texts behind them."""
    try:
        return False, float(text), ""
    except ValueError:
        return True, 0.0, text


def page(template: str, **content: Any) -> str:
    """Return a page from its template. What is not markup is escaped, and nothing but the page's own script can run."""
    environment = Environment(
        loader=PackageLoader("grpo.reporting"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["data"] = as_data
    environment.filters["show"] = show
    script = environment.get_template("browse.js").render()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template(template).render(script=Markup(script), digest=digest, **content)
