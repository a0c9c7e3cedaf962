"""The model card of an exported run: data, method, results and prompts."""

import re
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from grpo.rundir.files import read_json
from grpo.rundir.run_dir import Run, data_of
from grpo.rundir.summary import with_interval

ON_HUB = re.compile(r"[\w.-]+/[\w.-]+")


def model_card(run: Run, merged: bool = True) -> str:
    """Return the model card of a run: Markdown after its metadata; of its adapter alone unless that was merged."""
    config, task = run.config, run.config.task
    name = str(config.model.model_name_or_path)
    base = name if ON_HUB.fullmatch(name) and not Path(name).exists() else None
    data = ", ".join(data_of(single) for single in run.tasks.values())
    after = run.summary.get("accuracy_after")
    results, pipeline = None, "image-text-to-text" if task.images else "text-generation"
    if after is not None:
        results = [EvalResult(pipeline, data, data, "accuracy", after, dataset_split=task.eval.split)]
    metadata = ModelCardData(
        base_model=base,
        datasets=[data] if data == task.dataset.get("path") and ON_HUB.fullmatch(data) else None,
        library_name="transformers" if merged else "peft",
        pipeline_tag=pipeline,
        tags=["grpo", "trl", "reinforcement-learning", *([] if merged else ["lora"])],
        model_name="GRPO" if results else None,
        eval_results=results,
    )
    lines = [f"# {Path(name).name}, trained with GRPO", "", *_training(run, base or Path(name).name, data, merged), ""]
    lines += ["## Results", "", *_scores(run), ""]
    lines += ["## Use", "", *_use(run), "", "## Versions", ""]
    lines += [f"{package} {number}  " for package, number in run.summary.get("versions", {}).items()]
    return str(ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n" + "\n".join(lines) + "\n"))


def _training(run: Run, base: str, data: str, merged: bool) -> list[str]:
    config, train = run.config, run.config.train
    counts = run.summary.get("data", {}).get("train", {})
    rewards = ", ".join(f"`{name}` (weight {reward.get('weight', 1.0)})" for name, reward in config.reward.items())
    adapter = f"LoRA of rank {config.peft.get('r')}" if config.peft else "all weights"
    adapter += ", merged into the weights" if config.peft and merged else ""
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
    for when, result in run.evaluation.items():
        decoding = f"{when} training, greedy, {result['samples']} held-out problems"
        lines.append(f"| {decoding} | {with_interval(result['accuracy'], result['interval'])} |")
        for name, part in result.get("by_task", {}).items():
            decoding = f"{when} training, greedy, {part['samples']} held-out problems of {name}"
            lines.append(f"| {decoding} | {with_interval(part['accuracy'], part['interval'])} |")
    sampled = read_json(run.folder / "evaluate" / "evaluation.json")
    if sampled:
        decoding = f"greedy, {sampled['samples']} held-out problems"
        lines.append(f"| {decoding} | {with_interval(sampled['accuracy'], sampled['interval'])} |")
    for measure in ("pass@k", "maj@k"):
        for k, estimate in sampled.get(measure, {}).items():
            lines.append(f"| {measure.replace('k', k)} | {with_interval(estimate['value'], estimate['interval'])} |")
    return lines if len(lines) > 2 else ["Not evaluated."]


def _use(run: Run) -> list[str]:
    lines = []
    for name, task in run.tasks.items():
        of_task = f", task {name}" if name else ""
        lines += [f"Prompt template of the training{of_task}:", "", "```", str(task.prompt).rstrip("\n"), "```", ""]
        if task.system_prompt:
            lines += ["System prompt:", "", "```", task.system_prompt, "```", ""]
    lines += ["The model has not been tested on other kinds of problems."]
    return lines
