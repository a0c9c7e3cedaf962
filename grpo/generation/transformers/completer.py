"""Completions of prompts, plain or conversational, by transformers."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache
from transformers import PreTrainedModel, ProcessorMixin
from transformers.integrations import is_deepspeed_zero3_enabled, is_fsdp_managed_module
from trl import prepare_multimodal_messages

from grpo.generation.transformers.continuous_batching import ContinuousBatching, first_equal
from grpo.generation.transformers.settings import decoding
from grpo.utils.oom import is_out_of_memory

NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({})
Generate = Callable[[list[Any], float, list[int]], list[str]]
"""From prompts, a temperature (0 is greedy) and a seed for each to completions."""


class Completer:
    """Continues prompts, plain or conversational, by transformers' `generate`.

    After an OOM it generates fewer completions at once, unless the weights are sharded: the other processes would
    already wait for this process.

    Args:
        model: in evaluation mode.
        processing_class: the model's tokenizer or processor.
        length: length of the longest completion, tokens.
        template: further arguments of the chat template, such as `enable_thinking`.
    """

    def __init__(
        self, model: PreTrainedModel, processing_class: Any, length: int, template: Mapping[str, Any] = NO_ARGUMENTS
    ) -> None:
        self.model, self.processing_class, self.length, self.template = model, processing_class, length, template
        self.batching = ContinuousBatching()

    def __call__(
        self, prompts: list[Any], temperature: float = 0.0, seeds: Sequence[int] = (0,), length: int | None = None
    ) -> list[str]:
        """Return the completion of each prompt, of `length` tokens at most; with temperature 0 the likeliest."""
        length = length or self.length
        if temperature:
            torch.manual_seed(seeds[0])

        def inputs_of(places: list[int]) -> Any:
            batch = [prompts[place] for place in places]
            return encode(self.processing_class, batch, **self.template).to(self.model.device)

        def survives(error: BaseException) -> bool:
            sharded = is_fsdp_managed_module(self.model) or is_deepspeed_zero3_enabled()
            return is_out_of_memory(error) and not sharded

        tokens = self.batching.complete(
            self.model,
            first_equal(prompts),
            inputs_of,
            names=inputs_of([0]).keys(),
            options=decoding(self.model, self.processing_class, length, temperature),
            advice=f"a completion of {length} tokens does not fit into memory while it is generated",
            survives=survives,
            retry=lambda limit: clear_device_cache(garbage_collection=True),
        )
        return self.processing_class.batch_decode(tokens, skip_special_tokens=True)


def encode(processing_class: Any, prompts: list[Any], **template: Any) -> Any:
    """Return the inputs of a model for prompts, plain or conversational, with their images, padded on the left.

    `template` are further arguments of the chat template.
    """
    padding = {"padding": True, "padding_side": "left"}
    if isinstance(prompts[0], str):
        return processing_class(text=prompts, return_tensors="pt", **padding)
    options: dict[str, Any] = {"padding": True, "tokenizer_kwargs": {"padding_side": "left"}}
    if isinstance(processing_class, ProcessorMixin):  # which takes contents of one kind
        prompts, options = [prepare_multimodal_messages(prompt) for prompt in prompts], {"processor_kwargs": padding}
    return processing_class.apply_chat_template(
        prompts, add_generation_prompt=True, tokenize=True, return_tensors="pt", return_dict=True, **options, **template
    )
