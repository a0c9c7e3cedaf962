"""Dynamic sampling (DAPO, 2503.14476, section 3.2): groups whose rewards are equal make room for further problems.

Such a group has no advantages and teaches nothing. A step generates in rounds until its batch is full of groups with
different rewards; TRL then continues with these as if they had been generated at once.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from accelerate.utils import gather_object

from grpo.config.options import Rollout
from grpo.trainer import thumbnails
from grpo.trainer.batch import Batch
from grpo.trainer.overlap import OverlapTrainer
from grpo.trainer.problem_order import ProblemOrder
from grpo.utils.patching import replaced


@dataclass
class Completion:
    """A completion that has been generated and scored."""

    problem: int
    """Its row in the data."""
    prompt_ids: list[int]
    ids: list[int]
    mask: list[int] | None
    """1 for tokens of the policy, 0 for those of tools; None without tools."""
    logps: list | None
    """By the engine, for each token, as TRL's `rollout_func` returns them."""
    prompt: Any
    """The prompt with what an environment's `reset` has added, without its images."""
    messages: Any
    """Its text, or its messages, tool calls and their results included."""
    rewards: list[float]
    columns: dict[str, Any]
    """What rewards have logged of it."""


Group = list[Completion]
T = TypeVar("T")


class DynamicSamplingTrainer(OverlapTrainer):
    """A trainer that chooses problems and generates until there are enough groups with different rewards.

    Only as `rollout` says; its defaults leave both to TRL.

    Raises:
        ValueError: `engine.staleness=1` as well, which begins with problems that would not be taken, or several kinds
            of environments.
    """

    _pending_extra_logs: Any

    def __init__(self, *args: Any, rollout: Rollout | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rollout = rollout or Rollout()
        if self.takes_problems and self._overlaps:
            raise ValueError("engine.staleness=1: works without rollout.dynamic_sampling and rollout.prioritize")
        if self.takes_problems and self._multi_environment:
            raise ValueError("rollout.dynamic_sampling and rollout.prioritize: work with one environment, not several")
        self.accuracy_reward: str = self.reward_func_names[0]
        """Which reward is 1 for a correct completion, and 0 for others."""
        self._order: ProblemOrder | None = None
        self._kept: list[Completion] | None = None  # of all processes, while TRL continues with them

    @property
    def order(self) -> ProblemOrder:
        """The problems in the order in which they are taken."""
        if self._order is None:
            sampler = self._epoch_sampler or self._get_train_sampler()
            self._order = ProblemOrder(
                sampler.num_samples, sampler.seed, sampler.shuffle, prioritize=self.rollout.prioritize
            )
        return self._order

    @property
    def takes_problems(self) -> bool:
        """Whether each step takes as many problems as it needs, where TRL's sampler gives each the same number."""
        return self.rollout.dynamic_sampling or self.rollout.prioritize

    def _generate_and_score_completions(self, inputs: Any) -> Batch:
        if not (self.takes_problems and self.model.training):
            return super()._generate_and_score_completions(inputs)
        self._kept = self._informative(len(inputs))
        mine = self._share(self._kept)
        try:
            with (
                replaced(self, "rollout_func", lambda *_: as_rollout(mine)),
                replaced(self, "environment_factories", None),  # their episodes are over
                replaced(self, "environments", None),
            ):
                rows = [self._problem(one) | {"prompt": one.prompt} for one in mine]
                return super()._generate_and_score_completions(rows)
        finally:
            self._kept = None

    def _share(self, of_all: Sequence[T]) -> Sequence[T]:
        """Return this process's part of what is divided equally over all processes."""
        size = len(of_all) // self.accelerator.num_processes
        return of_all[self.accelerator.process_index * size :][:size]

    def _problem(self, completion: Completion) -> dict[str, Any]:
        return self.train_dataset[completion.problem]

    def _informative(self, count: int) -> list[Completion]:
        """Generate rounds until the batch is full, and return the completions of all processes.

        What is missing after the last round is filled with groups whose rewards are equal.

        Args:
            count: completions of this process in the batch.
        """
        processes = self.accelerator.num_processes
        wanted = count * processes // self.num_generations
        groups, teaching, rounds = list[tuple[Group, bool]](), 0, 0
        while teaching < wanted and rounds < (self.rollout.max_rounds if self.rollout.dynamic_sampling else 1):
            rounds += 1
            share = teaching / len(groups) if teaching else 1.0
            number = min(wanted, math.ceil((wanted - teaching) / share))
            groups += self._scored(self.order.take(-(-number // processes) * processes))
            teaching = sum(not equal for _, equal in groups)
        everything = [group for group, _ in groups]
        self._note_problems(everything)
        self._note_rounds(rounds, everything, teaching, wanted)
        self._end_with_the_data()
        if self.rollout.dynamic_sampling:
            groups.sort(key=lambda group: group[1])  # those with equal rewards last, each kind in its order
        return [completion for group, _ in groups[:wanted] for completion in group]

    def _scored(self, problems: Sequence[int]) -> list[tuple[Group, bool]]:
        """Return the groups of some problems, each with whether all of its rewards are equal."""
        size = self.num_generations
        mine = [problem for problem in self._share(problems) for _ in range(size)]
        with self._without_metrics():  # TRL's metrics are of what is trained on
            inputs, prompts, found = self._rollouts([self.train_dataset[problem] for problem in mine])
            prompt_ids, ids, masks, messages, logps, *_ = found
            rewards = self._calculate_rewards(inputs, prompts, messages, ids)
        columns, self._pending_extra_logs = self._pending_extra_logs, defaultdict(list)
        first = self.accelerator.process_index * len(mine)
        completions = [
            Completion(
                problem,
                prompt_ids[row],
                ids[row],
                masks[row] if masks is not None else None,
                logps[row] if logps is not None else None,
                prompts[row],
                messages[row],
                rewards[first + row].tolist(),
                {name: values[row] for name, values in columns.items()},
            )
            for row, problem in enumerate(mine)
        ]
        everyones = gather_object(completions)
        equal = self._zero_variance().view(-1, size)[:, 0].tolist()
        groups = [everyones[first : first + size] for first in range(0, len(everyones), size)]
        return list(zip(groups, equal, strict=True))

    def _tool_call_loop(self, *args: Any) -> Any:
        """Return what TRL's loop has returned for these completions in their rounds, and the counts of their calls."""
        if self._kept is None:
            return super()._tool_call_loop(*args)
        mine = self._share(self._kept)
        found = as_rollout(mine)
        messages = [one.messages for one in mine]
        results = [message for conversation in messages for message in conversation if message["role"] == "tool"]
        failures = sum(str(message["content"]).startswith("{'error': ") for message in results)
        no_images: list[list] = [[] for _ in messages]
        ids, logps = found["completion_ids"], found["logprobs"]
        return found["env_mask"], messages, ids, logps, len(results), failures, no_images

    def _calculate_rewards(self, inputs: list, prompts: list, *args: Any) -> torch.Tensor:
        if self._kept is not None:
            self._rewards = torch.tensor([one.rewards for one in self._kept], device=self.accelerator.device)
            mine = self._share(self._kept)
            for column in dict.fromkeys(column for one in self._kept for column in one.columns):
                self._log_completion_extra(column, [one.columns.get(column) for one in mine])
            self._complete_columns(len(mine))
            thumbnails.strip_images(inputs, prompts)
            return self._rewards
        return super()._calculate_rewards(inputs, prompts, *args)

    def _note_problems(self, groups: Sequence[Group]) -> None:
        """Remember the share of correct completions of each problem."""
        if self.rollout.prioritize:
            reward = self.reward_func_names.index(self.accuracy_reward)
            for group in groups:
                shares = torch.tensor([one.rewards[reward] for one in group]).nan_to_num().clamp(0, 1)
                self.order.correct[group[0].problem] = float(shares.mean())
            for name, number in self.order.counts().items():
                self._metrics["train"][f"rollout/problems_{name}"].append(number)

    def _note_rounds(self, rounds: int, groups: Sequence[Group], teaching: int, wanted: int) -> None:
        """Log what was generated, and the rewards of all of it."""
        metrics = self._metrics["train"]
        metrics["rollout/rounds"].append(rounds)
        metrics["rollout/groups_generated"].append(len(groups))
        metrics["rollout/groups_kept"].append(min(wanted, teaching))
        metrics["rollout/informative_share"].append(teaching / len(groups))
        metrics["rollout/problems"].append(self.order.taken)
        rewards = torch.tensor([one.rewards for group in groups for one in group])
        for name, values in zip(self.reward_func_names, rewards.T, strict=True):
            metrics[f"rollout/rewards/{name}/mean"].append(values.nanmean().item())
        weighted = (rewards * self.reward_weights.cpu()).nansum(1)
        metrics["rollout/reward"].append(weighted[~rewards.isnan().all(1)].mean().item())

    @property
    def has_taken_all(self) -> bool:
        """Whether all problems of all epochs have been taken, where no number of steps was asked for."""
        return self.args.max_steps <= 0 and self.order.taken >= self.args.num_train_epochs * self.order.count

    def _end_with_the_data(self) -> None:
        """Make these the last rollouts once all problems have been taken."""
        if self.has_taken_all:
            every = self.args.steps_per_generation * self.num_iterations
            self.state.max_steps = self.state.global_step + max(1, every // self.args.gradient_accumulation_steps)


def as_rollout(completions: Sequence[Completion]) -> dict[str, Any]:
    """Return completions as TRL's `rollout_func` does."""
    found: dict[str, Any] = {
        "prompt_ids": [one.prompt_ids for one in completions],
        "completion_ids": [one.ids for one in completions],
        "logprobs": [one.logps for one in completions] if completions[0].logps is not None else None,
    }
    if completions[0].mask is not None:
        found["env_mask"] = [one.mask for one in completions]
    return found
