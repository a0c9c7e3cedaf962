"""The losses of `grpo.losses` again, undivided and straight from their papers."""

from collections import defaultdict
from typing import Any

import torch
from trl import GRPOTrainer

from grpo.trainer.processes import own_part


def correct(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """1 for about a third of the completions."""
    return [float(sum(ids) % 3 == 0) for ids in completion_ids]


def logps_of(trainer: Any, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    ids, mask = (torch.cat((inputs[f"prompt_{name}"], inputs[f"completion_{name}"]), 1) for name in ("ids", "mask"))
    return trainer._get_per_token_logps_and_entropies(model, ids, mask, inputs["completion_ids"].size(1))[0]


class ByTheorem2(GRPOTrainer):
    """The mean score of the correct completions of a problem, less the mean score of all."""

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        scores = (logps_of(self, model, inputs) * inputs["completion_mask"]).sum(1)
        groups = defaultdict(list)
        for row, prompt in enumerate(inputs["prompt_ids"].tolist()):
            groups[tuple(prompt)].append(row)
        total = scores.new_zeros(())
        for rows in groups.values():
            solved = [row for row in rows if inputs["advantages"][row] > 0]
            if solved:
                total = total + len(rows) * (scores[solved].mean() - scores[rows].mean())
        return -total / (len(scores) * self.max_completion_length)


class ByEquation11(GRPOTrainer):
    """Token by token: a ratio, or nothing where the probability has moved too far the way of the advantage."""

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        now = logps_of(self, model, inputs).exp()
        old = inputs.get("old_per_token_logps", now.log()).detach().exp()
        sampled = inputs["sampling_per_token_logps"].exp() if "sampling_per_token_logps" in inputs else old
        total = now.new_zeros(())
        for row, column in inputs["completion_mask"].nonzero().tolist():
            moved, advantage = now[row, column] - sampled[row, column], inputs["advantages"][row]
            if not (advantage > 0 and moved > 0.02) and not (advantage < 0 and moved < -0.01):
                total = total - advantage * now[row, column] / sampled[row, column]
        return total * self.accelerator.num_processes / inputs["num_items_in_batch"]  # DDP takes the mean of them


DPPO = {"loss_type": "dppo", "epsilon": 0.01, "epsilon_high": 0.02, "num_iterations": 2, "max_steps": 4}


MAXRL = {"loss_type": "maxrl", "scale_rewards": "none", "reward_funcs": correct}
DERIVED = {"maxrl": (ByTheorem2, MAXRL), "dppo": (ByEquation11, DPPO)}
"""A trainer with the derivation of each loss, and the options for which it was written."""


class StockMaxRL(GRPOTrainer):
    """Dr. GRPO with advantages that are divided by the mean reward of the group (2602.02710, algorithm 1)."""

    def _calculate_rewards(self, *args: Any) -> torch.Tensor:
        self.found = super()._calculate_rewards(*args)
        return self.found

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)
        rewards = (self.found * self.reward_weights).nansum(1).masked_fill(self.found.isnan().all(1), torch.nan)
        means = own_part(self.accelerator, rewards.view(-1, 4).nanmean(1).repeat_interleave(4))
        batch["advantages"] = torch.where(means > 0, batch["advantages"] / means, 0.0)
        return batch


class StockBestOfTwo(GRPOTrainer):
    """Each completion of a group of four has the mean of the larger reward of itself and each other (2505.15201)."""

    def _calculate_rewards(self, *args: Any) -> torch.Tensor:
        rewards = super()._calculate_rewards(*args)
        if not self.model.training:
            return rewards
        total = (rewards * self.reward_weights).nansum(1).masked_fill(rewards.isnan().all(1), torch.nan)
        found = torch.full_like(rewards, torch.nan)
        for row, reward in enumerate(total.tolist()):
            others = [total[other].item() for other in range(row // 4 * 4, row // 4 * 4 + 4) if other != row]
            larger = [max(reward, other) for other in others if other == other]
            if reward == reward:  # with one reward in a group there is nothing to compare
                found[row, 0] = (sum(larger) / len(larger) if larger else reward) / self.reward_weights[0]
        return found


TRUNCATED = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1e6}
DAPO = {"loss_type": "dapo", "epsilon": 1e6, "vllm_importance_sampling_correction": True, **TRUNCATED}
AS_TRL: dict[str, tuple[type[GRPOTrainer], dict[str, Any], dict[str, Any]]] = {
    "maxrl": (StockMaxRL, {"loss_type": "dr_grpo"}, {}),
    # without what it masks, it is DAPO with the ratio to what has sampled the tokens
    "dppo": (GRPOTrainer, DAPO, {"epsilon": 1.0}),
}
"""For the combinations: a trainer of TRL's with the same gradient, its options, and ours with which that is so."""
