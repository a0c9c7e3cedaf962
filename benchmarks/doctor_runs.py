"""Runs of stock TRL for the benchmark of `grpo.doctor`: healthy ones, and ones with a planted fault.

All train the built-in policy on the built-in task. `trained` leaves `trainer_state.json` and the tables of completions.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from grpo.builtin.tasks.arithmetic import rows
from rewards.correctness import correctness

POLICY = Path(__file__).resolve().parents[1] / "grpo" / "builtin" / "tiny"
DEFAULTS = {
    **{"learning_rate": 3e-4, "temperature": 1.2, "lr_scheduler_type": "constant", "loss_type": "grpo"},
    **{"per_device_train_batch_size": 64, "num_generations": 8, "max_completion_length": 24, "max_steps": 50},
    **{"logging_steps": 1, "save_strategy": "no", "report_to": "none", "use_cpu": True, "bf16": False},
    **{"gradient_checkpointing": False, "log_completions": True, "num_completions_to_print": 0, "disable_tqdm": True},
}
"""Options of TRL's of every run."""
Reward = Callable[..., list[Any]]


@dataclass(frozen=True)
class Case:
    """A run: options that differ from `DEFAULTS`, and the finding that a planted fault should cause."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    rewards: tuple[Reward, ...] = (correctness,)
    expected: tuple[str, ...] = ()
    """Names of findings, any of which is the fault; none for a healthy run."""
    schedule: Callable[[int], float] | None = None
    """Factor of the learning rate by step, in the place of TRL's scheduler."""
    engine: str = ""
    """`in sync` or `stale`: an engine beside the trainer generates, in TRL's place for vLLM."""
    peft: bool = False


def tokens(completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Reward the length alone."""
    return [len(ids) / 24 for ids in completion_ids]


def constant(completions: list[str], **columns: Any) -> list[float]:
    """Reward every completion alike."""
    return [1.0] * len(completions)


def by_tag(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """Look for a tag that no prompt asks for."""
    marked = [re.findall(r"<answer>(\d+)</answer>", completion) for completion in completions]
    return [float(tags == [text]) for tags, text in zip(marked, answer, strict=True)]


def one_step(completions: list[str], answer: list[str], **columns: Any) -> list[float | None]:
    """Give up on completions with more than one calculation."""
    scores = correctness(completions, answer)
    return [None if text.count("=") > 1 else score for text, score in zip(completions, scores, strict=True)]


def closeness(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """Reward a last number near the answer."""
    last = [re.findall(r"\d+", completion)[-1:] for completion in completions]
    return [math.exp(-abs(int(n[0]) - int(a)) / 10) if n else 0.0 for n, a in zip(last, answer, strict=True)]


def short(completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Reward short completions a little."""
    return [1 - len(ids) / 24 for ids in completion_ids]


def a_fifth(completions: list[str], answer: list[str], **columns: Any) -> list[float | None]:
    """Give up on every fifth completion."""
    return [score if place % 5 else None for place, score in enumerate(correctness(completions, answer))]


def higher_rate(step: int) -> float:
    """Return a factor of the learning rate: 100 from step 25."""
    return 100.0 if step >= 25 else 1.0


def later_rate(step: int) -> float:
    """Return a factor of the learning rate: 30 from step 30."""
    return 30.0 if step >= 30 else 1.0


def ends_early(step: int) -> float:
    """Return a factor of the learning rate, of a linear schedule for 25 steps."""
    return max(0.0, 1 - step / 25)


class Engine:
    """In the place of vLLM: a copy of the policy, whose log-probabilities are rounded.

    Args:
        trainer: gets it as its engine.
        stale: it never takes the weights that are trained.
    """

    def __init__(self, trainer: GRPOTrainer, stale: bool) -> None:
        self.trainer, self.stale = trainer, stale
        self.model = AutoModelForCausalLM.from_pretrained(POLICY)
        trainer.use_vllm, trainer.vllm_mode = True, "colocate"
        trainer.vllm_generation, trainer._last_loaded_step = self, -1

    def sync_weights(self) -> None:
        """Take the policy's weights."""
        if not self.stale:
            self.model.load_state_dict(self.trainer.accelerator.unwrap_model(self.trainer.model).state_dict())

    def generate(self, prompts: list[list[int]], **options: Any) -> tuple:
        """Return completions, and the log-probability of each of their tokens, as TRL's connection to vLLM does."""
        padding, end = self.trainer._tokenizer.pad_token_id, self.trainer._tokenizer.eos_token_id
        longest = max(map(len, prompts))
        ids = torch.tensor([[padding] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        limits = {"max_new_tokens": self.trainer.max_completion_length, "pad_token_id": padding, "eos_token_id": end}
        sampled = self.model.generate(
            *(ids,),
            attention_mask=mask,
            do_sample=True,
            temperature=self.trainer.temperature,
            top_k=0,
            **limits,
            output_logits=True,
            return_dict_in_generate=True,
        )
        logps = (torch.stack(sampled.logits, 1) / self.trainer.temperature).log_softmax(-1)
        logps = logps + 0.01 * torch.randn_like(logps)
        completions, values = [], []
        for row, scored in zip(sampled.sequences[:, longest:].tolist(), logps, strict=True):
            size = row.index(end) + 1 if end in row else len(row)
            completions.append(row[:size])
            values.append([[scored[place, token].item()] for place, token in enumerate(row[:size])])
        return prompts, completions, values, None


FAULTS = [
    Case("learning rate 0", {"learning_rate": 0.0}, expected=("learning_rate_zero",)),
    Case("schedule for half of the steps", schedule=ends_early, expected=("learning_rate_ended",)),
    Case("reward is the length", rewards=(tokens,), expected=("length_only",)),
    Case("reward is constant", rewards=(constant,), expected=("reward_constant",)),
    Case(
        "constant reward of weight 0.2",
        {"reward_weights": [0.2]},
        (constant,),
        ("zero_variance_missed", "reward_constant"),
    ),
    Case("completions of 8 tokens", {"max_completion_length": 8}, expected=("cut_off",)),
    Case("reward gives None", rewards=(one_step,), expected=("reward_missing",)),
    Case("reward looks for another format", rewards=(by_tag,), expected=("reward_constant", "never_fired")),
    Case("learning rate x 100 in the second half", schedule=higher_rate, expected=("collapse",)),
    Case("beta 100", {"beta": 100.0}, expected=("kl_dominates",)),
    Case("engine with old weights", engine="stale", expected=("mismatch", "engine_drifts")),
    Case("temperature 0.02", {"temperature": 0.02}, expected=("identical",)),
    Case("held out: learning rate x 30 from step 30", {"seed": 35}, schedule=later_rate, expected=("collapse",)),
    Case("held out: beta 10", {"beta": 10.0, "seed": 36}, expected=("kl_dominates",)),
    Case("held out: temperature 0.1", {"temperature": 0.1, "seed": 37}, expected=("identical",)),
    Case(
        "held out: engine with old weights, learning rate 1e-4",
        {"learning_rate": 1e-4, "seed": 38},
        expected=("mismatch", "engine_drifts"),
        engine="stale",
    ),
    Case("held out: completions of 14 tokens", {"max_completion_length": 14, "seed": 39}, expected=("cut_off",)),
    Case("held out: reward gives None to a fifth", {"seed": 40}, (a_fifth,), ("reward_missing",)),
]
HEALTHY = [
    *(Case(f"seed {seed}", {"seed": seed}) for seed in range(1, 6)),
    Case("learning rate 1e-4", {"learning_rate": 1e-4, "seed": 6}),
    Case("learning rate 6e-4", {"learning_rate": 6e-4, "seed": 7}),
    Case("beta 0.01", {"beta": 0.01, "seed": 8}),
    Case("beta 0.1", {"beta": 0.1, "seed": 9}),
    Case("loss dapo", {"loss_type": "dapo", "epsilon_high": 0.28, "seed": 10}),
    Case("loss dr_grpo", {"loss_type": "dr_grpo", "scale_rewards": "none", "seed": 11}),
    Case("groups of 4", {"num_generations": 4, "seed": 12}),
    Case("groups of 16", {"num_generations": 16, "seed": 13}),
    Case("two updates per rollout", {"num_iterations": 2, "seed": 14}),
    Case("linear schedule with warm-up", {"lr_scheduler_type": "linear", "warmup_steps": 5, "seed": 15}),
    Case("cosine schedule", {"lr_scheduler_type": "cosine", "learning_rate": 5e-4, "seed": 16}),
    Case("two rewards", {"reward_weights": [1.0, 0.2], "seed": 17}, rewards=(correctness, short)),
    Case("partial reward", {"seed": 18}, rewards=(closeness,)),
    Case("engine in sync", {"seed": 19}, engine="in sync"),
    Case("LoRA, logged every 2 steps", {"logging_steps": 2, "learning_rate": 2e-3, "seed": 20}, peft=True),
    Case("held out: rewards of weight 1 and 0.5", {"reward_weights": [1.0, 0.5], "seed": 31}, (correctness, short)),
    Case("held out: partial reward and length", {"seed": 32}, (closeness, short)),
    Case("held out: engine in sync, loss dapo", {"loss_type": "dapo", "seed": 33}, engine="in sync"),
    Case(
        "held out: cosine schedule, learning rate 6e-4",
        {"learning_rate": 6e-4, "lr_scheduler_type": "cosine", "seed": 34},
    ),
    Case("held out: beta 0.04, groups of 16", {"beta": 0.04, "num_generations": 16, "seed": 41}),
]


def trained(case: Case, folder: Path, steps: int | None = None) -> None:
    """Train a case with stock TRL into a folder."""
    options = DEFAULTS | case.options | ({"max_steps": steps} if steps else {})
    examples = rows("train", 2000, 0)
    data = Dataset.from_list([{"prompt": f"{row['question']}\n", "answer": row["answer"]} for row in examples])
    trainer = GRPOTrainer(
        model=str(POLICY),
        reward_funcs=list(case.rewards),
        args=GRPOConfig(output_dir=str(folder), **options),
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(POLICY, padding_side="left"),
        peft_config=LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM") if case.peft else None,
    )
    if case.schedule:
        trainer.optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=trainer.args.learning_rate)
        trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, case.schedule)
    if case.engine:
        Engine(trainer, case.engine == "stale")
    trainer.train()
    trainer.save_state()
