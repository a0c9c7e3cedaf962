"""A tiny policy of Qwen3.5's architecture learns a built-in task after long prompts: by stock TRL and by ours.

`python -m benchmarks.hybrid` teaches a policy of random weights sums of two numbers by a teacher that often loses ten,
for ten minutes, and keeps it in `outputs/benchmarks/hybrid`. Both trainers then train it with the same seed on sums
after forty-eight solved ones. It prints a table and writes `benchmarks/hybrid.json` and `docs/hybrid.png`.
"""

import json
import os
import random
import statistics
from collections.abc import Iterator
from datetime import date
from itertools import islice

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    get_cosine_schedule_with_warmup,
)

from benchmarks.train import ROOT, draw, measured, trained
from grpo.builtin.tasks.splits import of_split
from grpo.builtin.tasks.sums import draw_summands
from grpo.extras.builtin_policies.build import arithmetic_tokenizer, padded

FOLDER = ROOT / "outputs" / "benchmarks" / "hybrid"
SOLVED = 48
"""Solved sums before each sum, 450 tokens with them."""
SUMS = list(islice(of_split(draw_summands, sorted, "train", seed=0), 8192))
TAUGHT = 140
"""Optimizer steps before the reinforcement learning."""
NOISE = 0.6
"""Probability that the teacher's tens are incorrect, in the second half of these steps."""
STEPS = 100
MEAN = 10
"""Steps whose accuracy a point of the picture is the mean of."""


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
    """Yield batches of sequences of sums, of which the teacher's results carry labels."""
    rng = random.Random(0)
    for step in range(steps):
        rows = []
        for _ in range(size):
            ids, labels = list[int](), list[int]()
            for first, second in rng.sample(SUMS, SOLVED + 1):
                asked = tokenizer(f"{first} + {second} =")["input_ids"]
                forgets = step >= steps // 2 and rng.random() < NOISE
                result = [*tokenizer(f" {first + second - 10 * forgets}")["input_ids"], tokenizer.eos_token_id]
                ids += asked + result
                labels += [-100] * len(asked) + result
            rows.append((ids, labels))
        yield padded(rows, tokenizer.pad_token_id)


def teach() -> None:
    """Write a policy that has seen sums with their results."""
    tokenizer = arithmetic_tokenizer()
    policy = untrained(tokenizer)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=40, num_training_steps=TAUGHT)
    for batch in track(batches(tokenizer, 32, TAUGHT), "teaching", total=TAUGHT):
        policy(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    policy.save_pretrained(FOLDER)
    tokenizer.model_max_length = policy.config.max_position_embeddings
    tokenizer.save_pretrained(FOLDER)


def overrides() -> list[str]:
    """Return the overrides of `grpo.train`, with the solved sums."""
    solved = ", ".join(f'{{question: "{a} + {b}", answer: "{a + b}"}}' for a, b in SUMS[-SOLVED:])
    return [
        f"model.model_name_or_path={FOLDER}",
        "task=sums",
        "task.max_prompt_length=512",
        f"task.few_shot.examples=[{solved}]",
        "task.few_shot.completion=' {answer}<eos>'",
        "task.eval.size=100",
        f"train.max_steps={STEPS}",
        "train.per_device_train_batch_size=64",
        "train.learning_rate=3e-4",
        "train.seed=0",
    ]


def smooth(curve: list[float]) -> list[float]:
    """Return means over the last steps."""
    return [statistics.mean(curve[max(0, step + 1 - MEAN) : step + 1]) for step in range(len(curve))]


def main() -> None:
    """Teach, train by both, print and write."""
    if not (FOLDER / "model.safetensors").is_file():
        teach()
    runs = [measured(name, 0, trained(name, f"hybrid-{name}", overrides())) for name in ("trl", "ours")]
    table = Table("trainer", "before", "after", "s/step", "of which generation", f"{STEPS} steps, s", "peak host GiB")
    for each in runs:
        accuracy = [f"{each[when]:.1%}" for when in ("before", "after")]
        numbers = [str(each[name]) for name in ("step_s", "generate_s", "steps_s", "peak_host_gb")]
        table.add_row(each["trainer"], *accuracy, *numbers)
    Console().print(table)
    result = {"date": str(date.today()), "cpu_cores": os.cpu_count(), "runs": runs}
    (ROOT / "benchmarks" / "hybrid.json").write_text(json.dumps(result) + "\n")
    draw([each | {"curve": smooth(each["curve"])} for each in runs], ROOT / "docs" / "hybrid.png")


if __name__ == "__main__":
    main()
