"""The gradient of `ExactGRPOTrainer` against that of stock TRL on the same rollouts, for each kind of loss.

`python -m benchmarks.exactness` takes a minute, prints a table and writes `benchmarks/exactness.json`.
"""

import copy
import functools
import json
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
import trl
from peft import LoraConfig
from rich.console import Console
from rich.table import Table
from transformers.utils import logging

from grpo.options import LOSS_MEANS, Update
from grpo.trainer import ExactGRPOTrainer
from tests import vision_policies
from tests.stock_trl import LONGEST, Record, make, relative_difference, rollouts, train

HERE = Path(__file__).parent


def image_options(family: str, method: str) -> dict[str, Any]:
    """Return the options of a case with images; with full fine-tuning in four slices."""
    return {**vision_policies.options(family, method), "update": Update(60), **(FOUR if method == "full" else {})}


FOUR = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 4}
CASES: dict[str, dict[str, Any]] = {}
for loss_type in LOSS_MEANS:
    CASES[loss_type] = {"loss_type": loss_type}
    CASES[f"{loss_type}, sequence level, KL, 4 slices, 2 iterations"] = {
        "loss_type": loss_type,
        "importance_sampling_level": "sequence",
        "beta": 0.04,
        "num_iterations": 2,
        "max_steps": 4,
        **FOUR,
    }
    CASES[f"{loss_type}, 4 slices, 2 iterations, truncated masked, batch scale, prompts not shared"] = {
        "loss_type": loss_type,
        "update": Update(max_tokens_per_microbatch=120, share_prompts=False),
        "num_iterations": 2,
        "max_steps": 4,
        "mask_truncated_completions": True,
        "scale_rewards": "batch",
        **FOUR,
    }
for loss_type in ("grpo", "bnpo", "dapo"):
    CASES[f"{loss_type}, entropy bonus, 4 slices"] = {"loss_type": loss_type, "entropy_coef": 0.01, **FOUR}
    CASES[f"{loss_type}, 4 steps a generation of 2 slices"] = {
        "loss_type": loss_type,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 8,
        "per_device_train_batch_size": 4,
        "max_steps": 5,
    }
    CASES[f"{loss_type}, 2 generations a step"] = {"loss_type": loss_type, "steps_per_generation": 2, **FOUR}
ADAPTIVE = {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 5.0, "max_steps": 4}
CASES |= {
    "unscaled rewards": {"scale_rewards": "none"},
    "sequence level": {"importance_sampling_level": "sequence", "num_iterations": 2},
    "KL": {"beta": 0.04},
    "KL with bias correction, 2 iterations": {"beta": 0.04, "use_bias_correction_kl": True, "num_iterations": 2},
    "adaptive entropy, 4 slices": {**ADAPTIVE, **FOUR},
    "high-entropy tokens only (undivided)": {"top_entropy_quantile": 0.2, **FOUR},
    "two-sided clipping, 2 iterations": {"loss_type": "grpo", "delta": 1.2, "num_iterations": 2},
    "off-policy mask, 2 iterations": {"off_policy_mask_threshold": 0.05, "num_iterations": 2},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "LoRA": {"peft_config": LoraConfig(target_modules="all-linear", init_lora_weights=False)},
    "LoRA, KL, checkpointing": {
        "peft_config": LoraConfig(target_modules="all-linear", init_lora_weights=False),
        "beta": 0.04,
        "gradient_checkpointing": True,
    },
    "padding to multiples of 8": {"pad_to_multiple_of": 8},
    "tokens of the environment masked": {
        "rollout_func": lambda prompts, trainer: with_environment(rollouts(prompts, trainer))
    },
    "no advantage anywhere": {"reward_funcs": lambda prompts, **kwargs: [1.0] * len(prompts)},
    "one row left": {
        "mask_truncated_completions": True,
        "rollout_func": lambda prompts, trainer: one_complete(prompts),
    },
    "one token each": {"length": lambda generator: 1},
    "equal lengths": {"length": lambda generator: LONGEST},
    "every row alone": {"update": Update(max_tokens_per_microbatch=1)},
    "one micro-batch": {"update": Update(max_tokens_per_microbatch=10_000)},
    "nothing skipped": {"update": Update(max_tokens_per_microbatch=120, skip_zero_advantage=False)},
}
IMAGES = {
    f"images, {family}, {method}": functools.partial(image_options, family, method)
    for family in vision_policies.FAMILIES
    for method in vision_policies.METHODS
}
"""Functions that return the options of a case with images, which hold a policy."""


def with_environment(rollout: dict[str, Any]) -> dict[str, Any]:
    """Return the rollouts with every third token as one of the environment."""
    masks = [[int(place % 3 != 1) for place in range(len(ids))] for ids in rollout["completion_ids"]]
    return rollout | {"env_mask": masks}


def one_complete(prompts: list[str]) -> dict[str, Any]:
    """Return rollouts of which all completions are truncated but one."""
    completions = [[5 + row, 7, 9] for row in range(len(prompts))]
    completions[2][-1] = 1
    return {"prompt_ids": [[4, 6, 8]] * len(prompts), "completion_ids": completions, "logprobs": None}


class Comparison(NamedTuple):
    """Ours against stock TRL."""

    gradients: list[float]
    """Relative difference of each step's gradient."""
    weights: float
    """Relative difference of the weights after the last step."""
    moved: float
    """Relative difference of the weights before and after."""
    ours: Record
    theirs: Record


def compare(options: dict[str, Any]) -> Comparison:
    """Train by stock TRL, then by ours from the same seed and, step by step, from the same weights."""
    theirs_options = {key: value for key, value in copy.deepcopy(options).items() if key != "update"}
    ours_options = {"update": Update(max_tokens_per_microbatch=120), **copy.deepcopy(options)}
    with tempfile.TemporaryDirectory() as folder:
        theirs = make(trl.GRPOTrainer, Path(folder), **theirs_options)
        record_theirs = train(theirs)
        ours = make(ExactGRPOTrainer, Path(folder), **ours_options)
        record_ours = train(ours, start_from=record_theirs.weights)
    return Comparison(
        gradients=[
            relative_difference(mine, stock)
            for mine, stock in zip(record_ours.gradients, record_theirs.gradients, strict=True)
        ],
        weights=relative_difference(ours.model.state_dict(), theirs.model.state_dict()),
        moved=relative_difference(theirs.model.state_dict(), record_theirs.weights[0]),
        ours=record_ours,
        theirs=record_theirs,
    )


def main() -> None:
    """Compare, print and write."""
    logging.set_verbosity_error()
    table = Table("case", "gradient", "weights after the last step")
    results = {}
    for name, options in (CASES | IMAGES).items():
        compared = compare(options if isinstance(options, dict) else options())
        results[name] = {"gradient": max(compared.gradients), "weights": compared.weights}
        table.add_row(name, f"{max(compared.gradients):.1e}", f"{compared.weights:.1e}")
    Console().print(table)
    versions = {name: version(name) for name in ("torch", "trl", "transformers", "peft")}
    result = {"date": str(date.today()), "device": "cpu", "dtype": str(torch.float32), "versions": versions}
    (HERE / "exactness.json").write_text(json.dumps({**result, "relative_difference": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
