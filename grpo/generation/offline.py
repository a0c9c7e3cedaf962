"""Generators of completions for a model that nobody trains: by transformers or by an engine of vLLM."""

import os
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from grpo.config.transport import engine_rank
from grpo.generation.transformers.completer import Completer, Generate
from grpo.generation.vllm.colocated import cpu_options, one_adapter
from grpo.model import policy
from grpo.view.images import engine_options, images_in, unexpanded

if TYPE_CHECKING:
    from omegaconf import DictConfig

OF_GPU, OF_HOST = 0.9, 0.15
"""Fraction of the memory that vLLM takes."""


def with_transformers(
    name: str,
    model_group: "DictConfig",
    peft: "DictConfig | None",
    length: int,
    device: str,
    template: Mapping[str, Any] | None = None,
) -> Generate:
    """Return a generator of completions of at most `length` tokens by transformers, of a model or an adapter.

    `template` is as of `load_processing_class`.
    """
    quantization = policy.quantization_config(peft) if policy.adapter_config(name) else None
    model, tokenizer = policy.load(name, model_group, device=device, quantization=quantization, template=template)
    return Completer(model, tokenizer, length)


def with_vllm(
    name: str, dtype: str, longest: int, length: int, processing_class: Any, most_images: int | None = None
) -> Generate:
    """Return a generator of completions by vLLM.

    Args:
        name: of the model, or a folder with an adapter.
        longest: tokens of the longest prompt, with its images.
        length: tokens of the longest completion.
        processing_class: the tokenizer or processor.
        most_images: in a prompt; None if none has any.
    """
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process, which nothing can outlive
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    on_gpu = torch.cuda.is_available()
    adapter = policy.adapter_config(name)
    request = LoRARequest("adapter", 1, str(Path(name).absolute())) if adapter else None
    with one_adapter() if adapter and not on_gpu else nullcontext():
        engine = LLM(
            model=adapter["base_model_name_or_path"] if adapter else name,
            tokenizer=name,
            dtype=dtype,
            enable_lora=bool(adapter),
            max_lora_rank=engine_rank(adapter["r"] if adapter else 1),
            **({"gpu_memory_utilization": OF_GPU} if on_gpu else cpu_options(OF_HOST, weights=0)),
            max_model_len=longest + length,
            **engine_options(processing_class, most_images),
        )

    def with_images(prompts: list[Any]) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = [{"prompt_token_ids": ids} for ids in unexpanded(processing_class, prompts)]
        for row, shown in zip(rows, map(images_in, prompts), strict=True):
            if shown:
                row["multi_modal_data"] = {"image": shown}
        return rows

    def generate(prompts: list[Any], temperature: float, seeds: list[int], length: int = length) -> list[str]:
        sampling = [SamplingParams(temperature=temperature, max_tokens=length, seed=seed) for seed in seeds]
        if isinstance(prompts[0], str):
            answers = engine.generate(prompts, sampling, lora_request=request)
        elif hasattr(processing_class, "image_processor"):
            answers = engine.generate(with_images(prompts), sampling, lora_request=request)
        else:
            ids = processing_class.apply_chat_template(prompts, add_generation_prompt=True, return_dict=True)[
                "input_ids"
            ]
            answers = engine.generate([{"prompt_token_ids": row} for row in ids], sampling, lora_request=request)
        return [answer.outputs[0].text for answer in answers]

    return generate
