"""Evaluation of a configured model, by transformers or by vLLM."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from grpo.data.rewards import check_grader, grader_of, running_rewards
from grpo.data.task import count_used, load_held_out, prompt_lengths, reward_columns
from grpo.evaluation.loop import Decoding, Evaluation, evaluate
from grpo.generation.offline import with_transformers, with_vllm
from grpo.generation.vllm_engine import BATCH
from grpo.model import policy
from grpo.rundir.files import ERRORS_FILE
from grpo.utils.device import kind_of_device
from grpo.utils.errors import RunError
from rewards.isolation.reward import RewardError


def evaluate_model(config: DictConfig, output: Path, console: Console) -> dict[str, Any]:
    """Evaluate `evaluate.model` on the held-out problems and return the content of `evaluation.json`.

    Args:
        output: folder for the completions and the errors of the grader.

    Raises:
        ConfigError: the model, the data or the grader cannot be loaded.
        RunError: the grader failed.
    """
    options, length = config.evaluate, config.train.max_completion_length
    model = config.model if options.model else policy.as_safetensors(config.model)
    name = options.model or model.model_name_or_path
    if not options.model:
        policy.download(name, model.model_revision)
    processing_class = policy.load_processing_class(model, name)
    problems, counts = load_held_out(config.task, processing_class)
    count_used("held_out", counts)
    longest = config.task.max_prompt_length  # images count
    most_images = None
    if config.task.images:
        most_images = max(map(len, problems.with_format(None)["shown_sizes"])) or None
    else:
        longest = max(prompt_lengths(list(problems["prompt"]), processing_class))
    device = "cpu" if config.train.use_cpu else kind_of_device()
    vllm = find_spec("vllm") is not None and (device == "cuda" or config.train.use_vllm)
    grader = grader_of(config.task.eval.reward, config.reward, config.train)
    with running_rewards(grader, reward_columns(problems), output, output / ERRORS_FILE) as rewards:
        check_grader(rewards[config.task.eval.reward])
        try:
            result = evaluate(
                with_vllm(name, model.dtype, longest, length, processing_class, most_images)
                if vllm
                else with_transformers(name, model, config.peft, length, device),
                Evaluation(
                    problems,
                    rewards[config.task.eval.reward],
                    Decoding(length, options.temperature, options.samples, config.train.seed),
                    file=output / "completions.jsonl",
                    batch_size=BATCH if vllm else options.batch_size,
                    console=console,
                    difficulty=config.task.eval.difficulty,
                    policy=fingerprint(config, name, "vllm" if vllm else "transformers", device != "cpu"),
                ),
            )
        except RewardError as error:
            raise RunError(f"failed: {error}") from error
    return result | {"model": name, "engine": "vllm" if vllm else "transformers", "data": counts}


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
        "pixels": (config.task.min_pixels, config.task.max_pixels),
        "engine": engine,
        "on_gpu": on_gpu,
    }
    return json.dumps(decisive)
