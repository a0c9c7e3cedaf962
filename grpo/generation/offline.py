"""Generators of completions for a model that nobody trains: by transformers or by an engine of vLLM."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from transformers import AutoTokenizer

from grpo import policy
from grpo.data import prompt_lengths
from grpo.generation.local import Generate, complete
from grpo.generation.vllm_engine import cpu_options

VLLM_SHARE = {"cuda": 0.9, "cpu": 0.15}  # of the memory

VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # of adapters, that it takes


def with_transformers(
    name: str, model_group: DictConfig, peft: DictConfig | None, length: int, device: str
) -> Generate:
    """Return a generator of completions of at most `length` tokens by transformers, of a model or an adapter."""
    quantization = policy.quantization_config(peft) if policy.adapter_config(name) else None
    model, tokenizer = policy.load(name, model_group, device=device, quantization=quantization)
    return partial(complete, model, tokenizer, length)


def with_vllm(name: str, dtype: str, length: int, prompts: list[Any]) -> Generate:
    """Return a generator of completions of at most `length` tokens by vLLM, with room for these prompts."""
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")  # it logs where everything else does
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process, which nothing can outlive
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    on_gpu = torch.cuda.is_available()
    adapter = policy.adapter_config(name)
    request = LoRARequest("adapter", 1, str(Path(name).absolute())) if adapter else None
    engine = LLM(
        model=adapter["base_model_name_or_path"] if adapter else name,
        tokenizer=name,
        dtype=dtype,
        enable_lora=bool(adapter),
        max_lora_rank=next(rank for rank in VLLM_RANKS if rank >= (adapter["r"] if adapter else 1)),
        **({"gpu_memory_utilization": VLLM_SHARE["cuda"]} if on_gpu else cpu_options(VLLM_SHARE["cpu"], weights=0)),
        max_model_len=max(prompt_lengths(prompts, AutoTokenizer.from_pretrained(name))) + length,
    )

    def generate(prompts: list[Any], temperature: float, seeds: list[int]) -> list[str]:
        how = [SamplingParams(temperature=temperature, max_tokens=length, seed=seed) for seed in seeds]
        ask = engine.generate if isinstance(prompts[0], str) else engine.chat
        return [answer.outputs[0].text for answer in ask(prompts, how, lora_request=request)]

    return generate
