"""Dynamic sampling (DAPO, 2503.14476, section 3.2): groups whose rewards are equal make room for further problems.

Such a group has no advantages and teaches nothing. A step generates in rounds until its batch is full of groups with
different rewards.
"""

import math
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from statistics import mean
from typing import Any

import torch

from grpo.options import Mixture, Rollout
from grpo.trainer import trl
from grpo.trainer.processes import own_part
from grpo.trainer.rollout.advantages import combined
from grpo.trainer.rollout.completion import Completion, Group, Row, own_tokens
from grpo.trainer.rollout.mixed_order import MixedOrder
from grpo.trainer.rollout.problem_order import ProblemOrder
from grpo.trainer.rollout.sampling import Sampled, Source, groups_of, rows_of
from grpo.view.stream import Stream

Make = Callable[[int], list[tuple[Group, bool]]]
"""From a number of problems to the groups of all processes, each with whether all of its rewards are equal."""


class DynamicSampling(Source):
    """Chooses problems, and has completions made until there are enough groups with different rewards.

    Args:
        options: the `rollout` group of the configuration.
        order: in which the problems are taken.
        processes: that generate; each round has as many problems for each.
        weights: of the reward functions, by their names.
        correct: name of the reward that is 1 for a correct completion, and 0 for others.
        mixture: the tasks of a `MixedOrder`, each with such a reward of its own.
        stream: the problems, where they are read while the run trains.
    """

    def __init__(
        self,
        options: Rollout,
        order: ProblemOrder | MixedOrder,
        processes: int,
        weights: Mapping[str, float],
        correct: str,
        mixture: Mixture | None = None,
        stream: Stream | None = None,
    ) -> None:
        super().__init__(stream)
        self.options, self.order, self.processes = options, order, processes
        self.weights, self.correct, self.mixture = weights, correct, mixture

    def sample(self, trainer: Any, rows: list[Row]) -> Sampled:
        """Return the completions of a step; groups with different rewards first. A collective call.

        Args:
            trainer: an `ExactGRPOTrainer`.
            rows: of the data loader, of which only their number counts.
        """
        if self.stream:
            self.stream.release(self.order.taken)
        completions, metrics = self.fill(groups_in(trainer, rows), partial(self._round, trainer))
        return completions, begin_step(trainer, self, completions, metrics)

    def _round(self, trainer: Any, number: int) -> list[tuple[Group, bool]]:
        problems = self.order.take(number)
        return groups_of(trainer, problems, rows_of(trainer, problems, trainer.num_generations))

    def has_taken_all(self, args: Any) -> bool:
        """Return whether all problems of all epochs have been taken, where no number of steps was asked for."""
        return args.max_steps <= 0 and self.order.taken >= args.num_train_epochs * self.order.count

    def state_dict(self) -> dict[str, Any]:
        """Return what the next steps depend on."""
        return {"order": self.order.state_dict(), "in_flight": None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with what `state_dict` has returned; a run that chose no problems has no order."""
        if state["order"]:
            self.order.load_state_dict(state["order"])

    def fill(self, wanted: int, make: Make) -> tuple[list[Completion], dict[str, float]]:
        """Make rounds until a batch is full; return its completions, of all processes, and the metrics of the rounds.

        What is missing after the last round is filled with groups whose rewards are equal.

        Args:
            wanted: groups in the batch.
            make: generates and scores the completions of a round.
        """
        groups, teaching, rounds = list[tuple[Group, bool]](), 0, 0
        while teaching < wanted and rounds < (self.options.max_rounds if self.options.dynamic_sampling else 1):
            rounds += 1
            fraction = teaching / len(groups) if teaching else 1.0
            number = min(wanted, math.ceil((wanted - teaching) / fraction))
            groups += make(-(-number // self.processes) * self.processes)
            teaching = sum(not equal for _, equal in groups)
        metrics = self._noted(groups) | {
            "rollout/rounds": rounds,
            "rollout/groups_generated": len(groups),
            "rollout/groups_kept": min(wanted, teaching),
            "rollout/informative_share": teaching / len(groups),
            "rollout/problems": self.order.taken,
        }
        if self.options.dynamic_sampling:
            groups.sort(key=lambda group: group[1])  # those with equal rewards last, each kind in its order
        return [completion for group, _ in groups[:wanted] for completion in group], metrics

    def _noted(self, groups: Sequence[tuple[Group, bool]]) -> dict[str, float]:
        """Remember the fraction of correct completions of each problem; return the metrics of all that was made."""
        metrics: dict[str, float] = {}
        mixed = self.order if isinstance(self.order, MixedOrder) else None
        if mixed and self.mixture:
            metrics |= metrics_by_task(groups, mixed.tasks, self.mixture, self.weights)
        if self.options.prioritize:
            for group, _ in groups:
                problem = group[0].problem
                grader = self.mixture.graders[mixed.tasks[problem]] if mixed and self.mixture else None
                place = list(self.weights).index(grader or self.correct)
                correct = float(torch.tensor([completion.rewards[place] for completion in group]).clamp(0, 1).nanmean())
                if not math.isnan(correct):  # else no completion has a reward
                    self.order.note(problem, correct)
            metrics |= {f"rollout/problems_{name}": number for name, number in self.order.counts().items()}
        rewards = torch.tensor([completion.rewards for group, _ in groups for completion in group])
        for name, values in zip(self.weights, rewards.T, strict=True):
            metrics[f"rollout/rewards/{name}/mean"] = values.nanmean().item()
        metrics["rollout/reward"] = combined(rewards, torch.tensor(list(self.weights.values()))).nanmean().item()
        return metrics


def metrics_by_task(
    groups: Sequence[tuple[Group, bool]], tasks: Sequence[str], mixture: Mixture, weights: Mapping[str, float]
) -> dict[str, float]:
    """Return reward, accuracy, mean length, zero-variance groups and number of groups of each task of a mixture.

    Args:
        groups: each with whether all of its rewards are equal.
        tasks: the task of each problem.
        mixture: has the reward that is the accuracy of each task.
        weights: of the rewards.
    """
    metrics: dict[str, float] = {}
    for name, grader in mixture.graders.items():
        mine = [(group, equal) for group, equal in groups if tasks[group[0].problem] == name]
        metrics[f"rollout/groups/{name}"] = len(mine)
        if not mine:
            continue
        completions = [completion for group, _ in mine for completion in group]
        rewards = torch.tensor([completion.rewards for completion in completions])
        metrics[f"reward/{name}"] = combined(rewards, torch.tensor(list(weights.values()))).nanmean().item()
        metrics[f"rollout/zero_variance/{name}"] = mean(equal for _, equal in mine)
        metrics[f"completions/mean_length/{name}"] = mean(own_tokens(completion) for completion in completions)
        if grader:
            metrics[f"accuracy/{name}"] = rewards[:, list(weights).index(grader)].nanmean().item()
    return metrics


def groups_in(trainer: Any, rows: Sequence[Row]) -> int:
    """Return the number of groups in a batch of which each process has these rows."""
    return len(rows) * trainer.accelerator.num_processes // trainer.num_generations


def begin_step(trainer: Any, source: Any, completions: Sequence[Completion], metrics: dict[str, float]) -> list[Row]:
    """Log the completions of a step as TRL's `_generate` does, and end a training that has taken all problems.

    Args:
        trainer: an `ExactGRPOTrainer`.
        source: has chosen the problems.
        completions: of all processes.
        metrics: of all that was generated.

    Returns:
        The rows of this process's completions, with opened images.
    """
    ends = trl.end_tokens(trainer)
    trainer.note(metrics | generation_metrics(completions, ends, tools=bool(trainer.tools)))
    lengths = (len(completion.prompt_ids) + own_tokens(completion) for completion in completions)
    trl.set_tokens_seen(trainer, trainer.state.num_input_tokens_seen + sum(lengths))
    if source.has_taken_all(trainer.args):  # these are the last rollouts
        every = trainer.args.steps_per_generation * trainer.num_iterations
        more = max(1, every // trainer.args.gradient_accumulation_steps)
        trainer.state.max_steps = trainer.state.global_step + more
    local = own_part(trainer.accelerator, completions)
    return trainer.rollouts.completer.shown(trainer, [trainer.problems[completion.problem] for completion in local])


def generation_metrics(completions: Sequence[Completion], ends: Container[int], tools: bool) -> dict[str, float]:
    """Return what TRL's `_generate` logs of completions, but for the number of tokens seen.

    Args:
        completions: of all processes.
        ends: tokens that end a completion; others were truncated.
        tools: whether the policy calls tools.
    """
    lengths = [own_tokens(completion) for completion in completions]
    ended = [completion.ids[-1] in ends for completion in completions]
    terminated = [length for length, ends_itself in zip(lengths, ended, strict=True) if ends_itself] or [0]
    metrics = {"completions/clipped_ratio": 1 - sum(ended) / len(ended)}
    for name, values in (("length", lengths), ("terminated_length", terminated)):
        metrics |= {
            f"completions/{kind}_{name}": float(of(values)) for kind, of in (("mean", mean), ("min", min), ("max", max))
        }
    if tools:
        results = [
            message for completion in completions for message in completion.messages if message["role"] == "tool"
        ]
        failures = sum(str(message["content"]).startswith("{'error': ") for message in results)
        metrics["tools/call_frequency"] = len(results) / len(completions)
        metrics["tools/failure_frequency"] = failures / len(results) if results else 0.0
    return metrics
