"""The model card of an exported run: what it was trained on, how, and how it scored."""

import json
import re
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from grpo.config.library import BUILDERS
from grpo.runs.run_dir import Run
from grpo.runs.summary import share

ON_HUB = re.compile(r"[\w.-]+/[\w.-]+")


def model_card(run: Run) -> str:
    """Return the card of a run as Markdown with its metadata in front."""
    config, task = run.config, run.config.task
    name = str(config.model.model_name_or_path)
    base = name if ON_HUB.fullmatch(name) and not Path(name).exists() else None
    data = data_of(task)
    after = run.summary.get("accuracy_after")
    results = None
    if after is not None:
        results = [EvalResult("text-generation", data, data, "accuracy", after, dataset_split=task.eval.split)]
    metadata = ModelCardData(
        base_model=base,
        datasets=[data] if data == task.dataset.get("path") and ON_HUB.fullmatch(data) else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["grpo", "trl", "reinforcement-learning"],
        model_name="GRPO" if results else None,
        eval_results=results,
    )
    lines = [f"# {Path(name).name}, trained with GRPO", "", *_training(run, base or Path(name).name, data), ""]
    lines += ["## How it scored", "", *_scores(run), ""]
    lines += ["## Use", "", *_use(run), "", "## Versions", ""]
    lines += [f"{package} {number}  " for package, number in run.summary.get("versions", {}).items()]
    return str(ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n" + "\n".join(lines) + "\n"))


def data_of(task: Any) -> str:
    """Return the data set's name on the hub, its generator, or the names of its files without their folders."""
    path, files = str(task.dataset.get("path") or ""), task.dataset.get("data_files")
    if files or (path and (Path(path).exists() or Path(path).suffix in BUILDERS)):
        named = files.values() if hasattr(files, "values") else [files or path]
        return ", ".join(Path(str(file)).name for file in named)
    return path or str(task.dataset.get("generator"))


def _training(run: Run, base: str, data: str) -> list[str]:
    config, train = run.config, run.config.train
    counts = run.summary.get("data", {}).get("train", {})
    rewards = ", ".join(f"`{name}` (weight {reward.get('weight', 1.0)})" for name, reward in config.reward.items())
    adapter = f"LoRA of rank {config.peft.get('r')}, merged here" if config.peft else "all weights"
    status = run.summary.get("status", "unknown")
    return [
        f"- Base: {base}",
        f"- Data: {data}, split {config.task.split}, {counts.get('used', 'unknown number of')} problems",
        f"- Rewards: {rewards}",
        f"- Trained: {adapter}, loss `{train.loss_type}`, {run.summary.get('steps', '?')} steps, groups of "
        f"{train.num_generations}, learning rate {train.learning_rate:g}, optimizer {train.optim or 'TRL default'}",
        f"- Prompts up to {config.task.max_prompt_length} tokens, completions up to {train.max_completion_length}",
        f"- The run is {status}" + (f": {run.summary['reason']}" if run.summary.get("reason") else ""),
    ]


def _scores(run: Run) -> list[str]:
    lines = ["| | accuracy |", "|---|---|"]
    file = run.folder / "evaluation.json"
    known: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    for when, found in known.items():
        what = f"{when} training, greedy, {found['samples']} held-out problems"
        lines.append(f"| {what} | {share(found['accuracy'], found['interval'])} |")
    later = run.folder / "evaluate" / "evaluation.json"
    sampled: dict[str, Any] = json.loads(later.read_text()) if later.is_file() else {}
    if sampled:
        what = f"greedy, {sampled['samples']} held-out problems"
        lines.append(f"| {what} | {share(sampled['accuracy'], sampled['interval'])} |")
    for measure in ("pass@k", "maj@k"):
        for k, found in sampled.get(measure, {}).items():
            lines.append(f"| {measure.replace('k', k)} | {share(found['value'], found['interval'])} |")
    return lines if len(lines) > 2 else ["It was not evaluated."]


def _use(run: Run) -> list[str]:
    task = run.config.task
    lines = ["The prompts it was trained with:", "", "```", str(task.prompt).rstrip("\n"), "```"]
    if task.system_prompt:
        lines += ["", "with the system prompt:", "", "```", task.system_prompt, "```"]
    lines += ["", "Outside of this kind of problem it has not been tested."]
    return lines
