"""A tiny policy of Qwen3.5's architecture learns the built-in task, with shared prompts and by stock TRL.

`python -m benchmarks.hybrid` first teaches a policy of random weights with the noisy teacher of `grpo.builtin.build`,
for about half an hour, and keeps it in `outputs/benchmarks/hybrid`. Both trainers then train it with the same seed on
problems after eight solved ones. It prints a table and writes `benchmarks/hybrid.json` and `docs/hybrid.png`.
"""

import random
from collections.abc import Iterator
from itertools import islice

import torch
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from benchmarks.train import ROOT
from grpo.builtin.build import padded
from grpo.builtin.tasks.splits import of_split
from grpo.builtin.tasks.sums import draw_summands

FOLDER = ROOT / "outputs" / "benchmarks" / "hybrid"
SOLVED = 48
"""Sums with their results before each sum."""
SUMS = list(islice(of_split(draw_summands, sorted, "train", seed=0), 8192))


def untrained(tokenizer: PreTrainedTokenizerFast) -> Qwen3_5ForCausalLM:
    """Return a policy with random weights: three layers of gated DeltaNet before one of full attention."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3_5ForCausalLM(config)


def batches(tokenizer: PreTrainedTokenizerFast, size: int, steps: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield batches of sequences of sums, of which the results carry labels."""
    rng = random.Random(0)
    for _ in range(steps):
        rows = []
        for _ in range(size):
            ids, labels = list[int](), list[int]()
            for first, second in rng.sample(SUMS, SOLVED + 1):
                asked = tokenizer(f"{first} + {second} =")["input_ids"]
                result = [*tokenizer(f" {first + second}")["input_ids"], tokenizer.eos_token_id]
                ids += asked + result
                labels += [-100] * len(asked) + result
            rows.append((ids, labels))
        yield padded(rows, tokenizer.pad_token_id)
