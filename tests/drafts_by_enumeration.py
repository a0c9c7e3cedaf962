"""Completions by a colocated vLLM with n-gram drafts have the policy's distribution: by enumeration of all completions.

`python -m tests.drafts_by_enumeration FOLDER`, as vLLM starts no further engine in a process that has loaded numba.
"""

import math
import shutil
import sys
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from grpo.config.schema import ROOT
from grpo.generation.vllm.engine import PolicyEngine

VOCABULARY, LENGTH, DRAWN = 4, 3, 3000
PROMPT = [1, 2, 3, 1, 2, 3, 1, 2]


def main(folder: Path) -> None:
    """Compare frequencies and log-probabilities; without `exact_on_cpu` both are far off."""
    policy = small_policy(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    options = {"temperature": 0.8, "max_completion_length": LENGTH, "gpu_memory_utilization": 0.01}
    options |= {"max_model_length": 32, "corrected": True, "drafts": "ngram", "generation_kwargs": {"ignore_eos": True}}
    engine = PolicyEngine(policy, Accelerator(cpu=True), tokenizer, mode="colocate", **options)
    _, completions, logprobs, _ = engine.generate([PROMPT] * DRAWN, None, 1)
    assert 0.02 < engine.metrics()["engine/draft_acceptance"] < 0.98

    possible = list(product(range(VOCABULARY), repeat=LENGTH))
    ids = torch.tensor([[*PROMPT, *completion] for completion in possible])
    with torch.no_grad():
        logits = policy(ids).logits[:, len(PROMPT) - 1 : -1] / options["temperature"]
    exact = dict(zip(possible, logits.log_softmax(-1).gather(2, ids[:, len(PROMPT) :, None])[..., 0], strict=True))
    for completion, values in zip(completions, logprobs, strict=True):
        assert [value for (value,) in values] == pytest.approx(exact[tuple(completion)].tolist(), abs=1e-4)
    counts, expected = Counter(map(tuple, completions)), {each: DRAWN * exact[each].sum().exp() for each in possible}
    statistic = float(sum((counts[each] - expected[each]) ** 2 / expected[each] for each in possible))
    free = len(possible) - 1
    assert min(expected.values()) > 3, "for the statistic to have its distribution"
    assert abs(statistic - free) < 4 * math.sqrt(2 * free)


def small_policy(folder: Path) -> LlamaForCausalLM:
    """A policy with a vocabulary of four tokens, each of which may follow each."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.03,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for file in (ROOT / "grpo" / "builtin" / "tiny").glob("*token*.json"):
        shutil.copy(file, folder)
    return LlamaForCausalLM.from_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
