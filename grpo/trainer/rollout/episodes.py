"""The beginning of rollouts: environments are reset, tools are bound to them, images go into the messages.

As TRL does at the beginning of `_generate_and_score_completions`, which cannot end after it.
"""

import copy
import inspect
from contextlib import AbstractContextManager
from typing import Any

from trl.data_utils import is_conversational, prepare_multimodal_messages

from grpo.trainer import trl
from grpo.trainer.rollout.completion import Row
from grpo.utils.patching import replaced

BY_TRL = ("reset", "get_reward")
"""Methods of an environment that TRL calls, and not the policy."""


def rollouts(trainer: Any, rows: list[Row]) -> tuple[list[Row], list, Any]:
    """Return rows with their images and what `rollout_func` adds, their prompts, and what TRL's `_generate` returns."""
    rows = trainer.rollouts.completer.shown(trainer, rows)
    prompts = begin(trainer, rows)
    generated = trainer.rollouts.completer.generate(trainer, prompts)
    for name, values in generated[5].items():
        for index, row in enumerate(rows):
            if not isinstance(values, list) or index < len(values):
                row[name] = values[index] if isinstance(values, list) else values
    return rows, prompts, generated


def answers(trainer: Any, rows: list[Row]) -> list[list[Row]]:
    """Return the likeliest conversation that follows each row's prompt, tool calls included.

    Args:
        trainer: an `ExactGRPOTrainer`.
        rows: of the data, for `reset` of the environment.
    """
    try:
        with greedily(trainer), replaced(trainer, "num_generations_eval", 1), trl.without_metrics(trainer):
            _, _, generated = rollouts(trainer, rows)
    finally:
        trainer.rollouts.discard()
    return generated[3]


def greedily(trainer: Any) -> AbstractContextManager[None]:
    """Return a context in which the likeliest completions are generated."""
    if trainer.use_vllm:
        return trainer.vllm_generation.greedy()
    greedy = copy.deepcopy(trainer.generation_config)
    greedy.update(do_sample=False, temperature=None, top_p=None, top_k=None, min_p=None, repetition_penalty=1.0)
    return replaced(trainer, "generation_config", greedy)


def begin(trainer: Any, rows: list[Row]) -> list[Any]:
    """Return the prompts of rows as TRL's `_generate` takes them, and give the trainer their environments and tools."""
    if trainer.environment_factories is None:
        prompts = [row["prompt"] for row in rows]
    else:
        prompts = [row.get("prompt", [{"role": "user", "content": ""}]) for row in rows]
        trainer.environments = trl.environments_of(trainer, rows)
    if trainer.tools:
        environments = trainer.environments or [None] * len(rows)
        trl.bind_tools(trainer, list(map(methods, environments)))
    if trainer.environments:
        hidden = {"environment"} if trl.has_several_environments(trainer) else set()
        for index, (row, environment) in enumerate(zip(rows, trainer.environments, strict=True)):
            observation = environment.reset(**{key: value for key, value in row.items() if key not in hidden})
            if observation is not None:
                prompts[index] = with_observation(prompts[index], observation)
    return with_images(prompts, rows)


def methods(environment: Any) -> list[Any]:
    """Return the methods of an environment that the policy may call."""
    if environment is None:
        return []
    names = [name for name, _ in inspect.getmembers(type(environment), inspect.isfunction)]
    return [getattr(environment, name) for name in names if name not in BY_TRL and not name.startswith("_")]


def with_observation(prompt: list[Row], observation: Any) -> list[Row]:
    """Return a prompt whose last message ends with what `reset` has returned, a text or parts of a content."""
    content = prompt[-1]["content"]
    if isinstance(observation, list) and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if isinstance(observation, str) and isinstance(content, list):
        observation = [{"type": "text", "text": observation}]
    return [*prompt[:-1], {**prompt[-1], "content": content + observation}]


def with_images(prompts: list[Any], rows: list[Row]) -> list[Any]:
    """Return prompts whose messages have the images of their rows.

    Raises:
        ValueError: prompts with images are texts.
    """
    if (images := images_by_row(rows)) is None:
        return prompts
    if not is_conversational(rows[0]):
        raise ValueError("images need prompts that are lists of messages: leave the chat template to the trainer")
    return [prepare_multimodal_messages(prompt, images=shown) for prompt, shown in zip(prompts, images, strict=True)]


def images_by_row(rows: list[Row]) -> list[list[Any] | None] | None:
    """Return the images of each row as TRL reads them; None without any."""
    if "images" in rows[0]:
        images = [row.get("images") for row in rows]
    elif "image" in rows[0]:
        images = [[row["image"]] if row.get("image") is not None else None for row in rows]
    else:
        return None
    return None if all(shown == [] for shown in images) else images
