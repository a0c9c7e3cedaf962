"""A script for TRL that trains with `ExactGRPOTrainer`: `python examples/drop_in.py`.

Compared with a script for `trl.GRPOTrainer` one import and one argument change; both are marked below. The built-in
policy trains on the built-in word problems for 10 steps, in half a minute on a CPU and without a download.
"""

from pathlib import Path

from datasets import Dataset
from trl import GRPOConfig

import grpo
from grpo.builtin.tasks.arithmetic import rows
from grpo.trainer import ExactGRPOTrainer, Update  # the import, instead of trl.GRPOTrainer

POLICY = Path(grpo.__file__).parent / "builtin" / "tiny"  # any causal language model, by folder or by name on the hub


def correct(completions, answer, **columns):
    """Return 1 for a completion that ends with the answer after `####`, else 0: a reward function as TRL expects it."""
    return [float(said.rstrip().endswith(f"#### {right}")) for said, right in zip(completions, answer, strict=True)]


problems = Dataset.from_list(rows(split="train", size=512, seed=0))  # columns question, answer and steps
problems = problems.map(lambda problem: {"prompt": f"{problem['question']}\n"})

trainer = ExactGRPOTrainer(
    model=str(POLICY),
    reward_funcs=correct,
    args=GRPOConfig(
        output_dir="outputs/drop_in",
        max_steps=10,
        per_device_train_batch_size=64,  # completions per step
        num_generations=8,
        max_completion_length=24,
        learning_rate=1e-3,
        temperature=1.2,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    ),
    train_dataset=problems,
    update=Update(max_tokens_per_microbatch=1024),  # the argument; optional
)
trainer.train()

rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
print(f"mean reward: {sum(rewards[:4]) / 4:.2f} in the first 4 steps, {sum(rewards[-4:]) / 4:.2f} in the last 4")
