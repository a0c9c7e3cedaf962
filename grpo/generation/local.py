"""Completions by transformers' generate, halved where memory runs out."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache
from transformers import PreTrainedModel, ProcessorMixin
from transformers.integrations import is_deepspeed_zero3_enabled, is_fsdp_managed_module
from trl import prepare_multimodal_messages

from grpo.utils.oom import half, halves, is_out_of_memory, smaller_until_it_fits

Generate = Callable[[list[Any], float, list[int]], list[str]]
"""From prompts, a temperature (0 is greedy) and a seed for each to completions."""


class Completer:
    """Continues prompts, plain or conversational, by transformers' `generate`.

    Prompts that do not fit into memory together are completed in two halves, and from then on no more of them at once;
    not where the weights are sharded, as the other processes already wait for this one.

    Args:
        model: in evaluation mode.
        processing_class: its tokenizer or processor.
        length: of the longest completion, tokens.
    """

    def __init__(self, model: PreTrainedModel, processing_class: Any, length: int) -> None:
        self.model, self.processing_class, self.length = model, processing_class, length
        self.at_once: int | None = None
        """Prompts that fit, once it is known that not all do."""

    def __call__(self, prompts: list[Any], temperature: float = 0.0, seeds: Sequence[int] = (0,)) -> list[str]:
        """Return the completion of each prompt; with temperature 0 the likeliest."""
        texts: list[str] = []

        def parts() -> list[range]:
            return halves(range(len(texts), len(prompts)), self.at_once)

        def add(rows: range) -> None:
            seed = seeds[rows[0]] if rows[0] < len(seeds) else seeds[0] + rows[0]
            part = [prompts[row] for row in rows]
            texts.extend(complete(self.model, self.processing_class, self.length, part, temperature, seed))

        def shrink(failed: range | None) -> None:
            count = len(failed or prompts)
            self.at_once = count - half(count)
            clear_device_cache(garbage_collection=True)

        def survives(error: BaseException) -> bool:
            sharded = is_fsdp_managed_module(self.model) or is_deepspeed_zero3_enabled()
            return is_out_of_memory(error) and not sharded

        def advice(failed: range | None) -> str:
            return f"a completion of {self.length} tokens does not fit into memory while it is generated"

        smaller_until_it_fits(parts, add, shrink, advice, survives)
        return texts


@torch.no_grad()
def complete(
    model: PreTrainedModel,
    processing_class: Any,
    length: int,
    prompts: list[Any],
    temperature: float = 0.0,
    seed: int = 0,
) -> list[str]:
    """Continue each prompt by at most `length` tokens; with temperature 0 the likeliest."""
    inputs = encode(processing_class, prompts).to(model.device)
    # whatever the model's generation_config.json says: rollouts are made without penalties and filters too
    how: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if temperature:
        torch.manual_seed(seed)
        how = {"do_sample": True, "temperature": temperature, "top_p": 1.0, "top_k": 0}
    how["repetition_penalty"] = 1.0
    tokens = model.generate(**inputs, max_new_tokens=length, **how)
    return processing_class.batch_decode(tokens[:, inputs["input_ids"].size(1) :], skip_special_tokens=True)


def encode(processing_class: Any, prompts: list[Any]) -> Any:
    """Return the inputs of a model for prompts, plain or conversational, with their images, padded on the left."""
    padding = {"padding": True, "padding_side": "left"}
    if isinstance(prompts[0], str):
        return processing_class(text=prompts, return_tensors="pt", **padding)
    how: dict[str, Any] = {"padding": True, "tokenizer_kwargs": {"padding_side": "left"}}
    if isinstance(processing_class, ProcessorMixin):  # which takes contents of one kind
        prompts, how = [prepare_multimodal_messages(prompt) for prompt in prompts], {"processor_kwargs": padding}
    return processing_class.apply_chat_template(
        prompts, add_generation_prompt=True, tokenize=True, return_tensors="pt", return_dict=True, **how
    )
