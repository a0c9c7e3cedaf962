"""Rollouts by transformers' `generate`, with the inputs and the weights that TRL gives it."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import Trainer
from trl.models import unwrap_model_for_generation
from trl.trainer.utils import pad

from grpo.generation.at_once import AtOnce, first_equal
from grpo.trainer.batch import Batch
from grpo.trainer.rollout.image_tokens import by_prompt, can_split, comparable, of_prompts


def complete(
    trainer: Any,
    at_once: AtOnce,
    prompts: list[list[int]],
    images: list | None,
    fields: Batch,
    group: int,
    with_tool_images: bool,
    longest: int,
    retry: Callable[[int], None],
) -> list[list[int]]:
    """Return the completion of each prompt, as TRL's `_generate_single_turn` does.

    Args:
        trainer: an `ExactGRPOTrainer`.
        prompts: tokens.
        images: of each prompt; None without any.
        fields: tensors of the images.
        group: completions of a prompt.
        with_tool_images: whether tools have returned images.
        longest: tokens of the longest completion.
        retry: is called after an OOM, with the completions at once from then on.

    Raises:
        DoesNotFit: a completion alone does not fit, or it is not known which tensors of images belong to which prompt.
    """
    processor, args = trainer.processing_class, trainer.args
    divisible = can_split(fields, images, prompts, processor)
    divided = by_prompt(fields, images, prompts, processor)

    def inputs_of(places: list[int]) -> Batch:
        part = of_prompts(divided, places) if len(places) < len(prompts) else fields
        return inputs(trainer, [prompts[place] for place in places], part, with_tool_images)

    shown = [comparable(of or []) for of in images or [[]] * len(prompts)]
    places = list(range(len(prompts)))
    with (
        unwrap_model_for_generation(
            trainer.model_wrapped,
            trainer.accelerator,
            gather_deepspeed3_params=args.ds3_gather_for_generation,
            generation_kwargs=trainer.generation_kwargs,
            gradient_checkpointing_kwargs=args.gradient_checkpointing_kwargs,
        ) as model,
        torch.no_grad(),
        trainer._dist.summon_full_params(trainer.model_wrapped, recurse=False),
    ):
        return at_once.complete(
            model,
            first_equal(list(zip(prompts, shown, strict=True))) if divisible else places,
            inputs_of,
            names=inputs_of(places[: 1 if divisible else None]),
            how={"generation_config": trainer.generation_config, "max_new_tokens": longest},
            advice="a completion does not fit into memory while it is generated: lower max_completion_length, or use a "
            "smaller or quantized model",
            group=group,
            survives=lambda error: divisible and trainer.survives(error),
            retry=retry,
        )


def inputs(trainer: Any, prompts: list[list[int]], fields: Batch, with_tool_images: bool) -> Batch:
    """Return the model's inputs for prompts, padded on the left, and the tensors of their images."""

    def padded(rows: list[list[int]], value: int) -> torch.Tensor:
        tensors = [torch.tensor(row) for row in rows]
        return pad(tensors, value, padding_side="left", pad_to_multiple_of=trainer.pad_to_multiple_of)

    ids = padded(prompts, trainer._tokenizer.pad_token_id)
    batch = {"input_ids": ids, "attention_mask": padded([[1] * len(prompt) for prompt in prompts], 0)}
    batch |= {key: padded(value, 0) if isinstance(value, list) else value for key, value in fields.items()}
    if trainer._is_vlm and trainer.tools and with_tool_images:
        kinds = torch.zeros_like(ids)
        for kind, token in ((1, trainer._image_pad_token_id), (2, trainer._video_pad_token_id)):
            if token is not None:
                kinds[ids == token] = kind
        batch["mm_token_type_ids" if "image_grid_thw" in batch else "token_type_ids"] = kinds
    return Trainer._prepare_inputs(trainer, batch)
