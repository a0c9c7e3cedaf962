"""Evaluation of a configured model, by transformers or by vLLM."""

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from datasets import Dataset
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from grpo.data.limits import check_limits
from grpo.data.mixture import named
from grpo.data.rewards import check_grader, grader_of, running_rewards
from grpo.data.task import count_used, load_held_out, prompt_lengths, reward_columns
from grpo.evaluation.by_task import file_of, in_total
from grpo.evaluation.loop import Decoding, Evaluation, evaluate
from grpo.generation.offline import with_transformers, with_vllm
from grpo.generation.vllm.engine import BATCH
from grpo.generation.vllm.start import EngineStart
from grpo.model import policy
from grpo.model.adapted import config_of
from grpo.model.thinking import template_of
from grpo.rundir.files import ERRORS_FILE
from grpo.utils.device import kind_of_device
from grpo.utils.errors import RunError
from rewards.isolation.reward import RewardError


def evaluate_model(
    config: DictConfig, tasks: Mapping[str, DictConfig], limits: Mapping[str, int], output: Path, console: Console
) -> dict[str, Any]:
    """Evaluate `evaluate.model` on the held-out problems and return the content of `evaluation.json`.

    Args:
        tasks: of the configuration, by their names; a single task has none.
        limits: tokens of the longest completion of each.
        output: folder for the completions and the errors of the grader.

    Raises:
        ConfigError: the model, the data or the grader cannot be loaded.
        RunError: the grader failed.
    """
    options, length = config.evaluate, config.train.max_completion_length
    model = config.model
    name = options.model or model.model_name_or_path
    if not options.model:
        policy.download(name, model.model_revision)
    template = template_of(config)
    processing_class = policy.load_processing_class(model, name, template)
    tasks = {task: single for task, single in tasks.items() if single.eval.size}
    loaded = {task: load_held_out_of(task, single, processing_class) for task, single in tasks.items()}
    longest, most_images = longest_of(config.task, [problems for problems, _ in loaded.values()], processing_class)
    if not policy.adapter_config(name):
        splits = [problems for problems, _ in loaded.values()]
        revision = "main" if options.model else model.model_revision
        check_limits(config_of(name, revision), processing_class, splits, max(limits.values()), longest)
    device = "cpu" if config.train.use_cpu else kind_of_device()
    vllm = find_spec("vllm") is not None and (device == "cuda" or config.train.use_vllm)
    graders, columns = graders_of(config, tasks, {task: problems for task, (problems, _) in loaded.items()})
    with running_rewards(graders, columns, output, output / ERRORS_FILE) as rewards:
        for grader in rewards.values():
            check_grader(grader)
        with EngineStart(console) if vllm else nullcontext():
            generate: Any = (
                with_vllm(name, model.dtype, longest, length, processing_class, most_images)
                if vllm
                else with_transformers(name, model, config.peft, length, device, template)
            )
        results = {}
        for task, single in tasks.items():
            evaluation = Evaluation(
                loaded[task][0],
                rewards[single.eval.reward],
                Decoding(limits[task], options.temperature, options.samples, config.train.seed),
                file=file_of(output / "completions.jsonl", task),
                batch_size=BATCH if vllm else options.batch_size,
                console=console,
                difficulty=single.eval.difficulty,
                policy=fingerprint(config, name, "vllm" if vllm else "transformers", device != "cpu"),
            )
            try:
                results[task] = evaluate(partial(generate, length=limits[task]), evaluation)
            except RewardError as error:
                raise RunError(f"failed: {error}") from error
    counts = {task: count for task, (_, count) in loaded.items()}
    about = {"model": name, "engine": "vllm" if vllm else "transformers", "data": counts.get("", counts)}
    return in_total(results) | about


def longest_of(task: DictConfig, problems: Sequence[Dataset], processing_class: Any) -> tuple[int, int | None]:
    """Return the tokens of the longest prompt, and the images of the prompt with most; None if none has any."""
    if task.images:  # which count as tokens
        (dataset,) = problems
        return task.max_prompt_length, max(map(len, dataset.with_format(None)["shown_sizes"])) or None
    return max(max(prompt_lengths(list(dataset["prompt"]), processing_class)) for dataset in problems), None


def graders_of(
    config: DictConfig, tasks: Mapping[str, DictConfig], problems: Mapping[str, Dataset]
) -> tuple[dict[str, dict[str, Any]], dict[str, list[str]]]:
    """Return options of the graders of tasks, and the columns that the problems of all tasks of each grader have."""
    options: dict[str, dict[str, Any]] = {}
    columns: dict[str, list[str]] = {}
    for name, task in tasks.items():
        grader, usable = task.eval.reward, reward_columns(problems[name])
        options |= grader_of(grader, config.reward, config.train)
        columns[grader] = [column for column in columns.get(grader, usable) if column in usable]
    return options, columns


def load_held_out_of(name: str, task: DictConfig, processing_class: Any) -> tuple[Dataset, dict[str, int]]:
    """Return the held-out problems of a task, with its name in a column if it has one, and their counts."""
    problems, counts = load_held_out(task, processing_class)
    count_used(f"{name}/held_out" if name else "held_out", counts)
    return named(problems, name) if name else problems, counts


def fingerprint(config: DictConfig, name: str, engine: str, on_gpu: bool) -> str:
    """Return a fingerprint of everything that determines the completions of a prompt, except the sampling options.

    Args:
        name: name of the model, or a folder with a model or an adapter.
        engine: `vllm` or `transformers`.
        on_gpu: whether a GPU computes.
    """
    adapter = policy.adapter_config(name) or {}
    folders = [Path(name), Path(str(adapter.get("base_model_name_or_path") or name))]
    files = sorted({file for folder in folders if folder.is_dir() for file in folder.iterdir() if file.is_file()})
    decisive = {
        "name": name,
        "files": [(str(file), file.stat().st_mtime_ns) for file in files],
        "options": OmegaConf.to_container(OmegaConf.masked_copy(config, ["model", "peft"]), resolve=True),
        "template": repr(template_of(config) or None),
        "pixels": (config.task.min_pixels, config.task.max_pixels),
        "engine": engine,
        "on_gpu": on_gpu,
    }
    return json.dumps(decisive)
