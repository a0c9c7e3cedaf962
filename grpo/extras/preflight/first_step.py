"""The first step of a run at a line of learning rates, from the gradient of one batch; no step is kept.

The trainer of the run makes two batches. The gradient of the second batch, clipped, moves the policy by the run's own
optimizer; the first batch, whose problems the gradient has not seen, shows the effect.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from transformers import TrainerCallback, TrainerState, set_seed

from grpo.config.facts import sharding_strategy
from grpo.options import steps_in_backward
from grpo.rundir.files import read_json, write_json
from grpo.trainer import ExactGRPOTrainer, trl
from grpo.trainer.batch import Batch, as_sequences, images_of, loss_mask
from grpo.trainer.rollout.completion import Completion
from grpo.trainer.rollout.stages import Stage
from grpo.utils.errors import DoesNotFit
from grpo.utils.oom import is_out_of_memory

FILE = "first_step.json"
SPACING = math.sqrt(10)
"""Ratio of neighbouring rates."""
START = 1e-5
"""The rate that is tried first; the line follows from its KL."""
LOWEST, HIGHEST = 1e-6, 1.0
"""KL in nats per token at the ends of the line, about."""
WIDEST = 1e6
"""No larger rate is tried."""


@dataclass(frozen=True)
class Step:
    """The policy after the first step with a learning rate."""

    rate: float
    kl: float | None
    """KL divergence of the policy before to the policy after, nats per token of held-out completions; None where it is
    infinite: the policy is destroyed."""
    gain: float
    """Mean change in the log-probability of completions with a positive advantage, minus that of completions with a
    negative one, weighted by advantage; nats per completion of the batch whose gradient it is."""


@dataclass(frozen=True)
class FirstStep:
    """Effects of the first step of a run."""

    steps: list[Step]
    """At a line of rates, and at the rate of the run unless it is 0; none if it was not tried."""
    seconds: float | None = None
    """Time of the update per completion; None if it was not tried."""
    reason: str = ""
    """Reason why there are no steps."""

    def at(self, rate: float) -> Step | None:
        """Return the step at a rate of the line; None without one."""
        return next((step for step in self.steps if step.rate == rate), None)


def why_not_tried(config: DictConfig) -> str:
    """Return the reason why one process cannot try the first step of a run; empty if it can."""
    if strategy := sharding_strategy(config.train):
        return f"its weights are divided over processes ({strategy})"
    if steps_in_backward(str(config.train.optim)):
        return f"train.optim={config.train.optim} changes weights during the backward pass"
    return ""


def try_first_step(trainer: ExactGRPOTrainer) -> FirstStep:
    """Return the effects of the first step; the policy stays as it is.

    Args:
        trainer: makes two steps, and saves nothing.
    """
    batches = FirstBatches()
    trainer.rollouts.stages = [*trainer.rollouts.stages, batches]
    line = LineOfRates(trainer, batches, trainer.args.learning_rate)
    trainer.add_callback(line)
    set_seed(trainer.args.seed)
    try:
        trainer.train()
    except RuntimeError as error:
        if not (isinstance(error, DoesNotFit) or is_out_of_memory(error)):
            raise
        return FirstStep([], reason=f"a step does not fit: {error}".splitlines()[0])
    reason = "" if line.steps else "no completion of a batch has a gradient"
    return FirstStep(line.steps, line.seconds, reason)


class FirstBatches(Stage):
    """Notes the batches of a training."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.made_at = 0.0
        """When the last batch was made, by `time.perf_counter`."""

    def assemble(self, trainer: Any, completions: Sequence[Completion], batch_of: Callable[[], Batch]) -> Batch:
        """Return the batch, and note it."""
        self.batches.append(batch_of())
        self.made_at = time.perf_counter()
        return self.batches[-1]


class LineOfRates(TrainerCallback):
    """Drops the gradient of the first batch; takes steps by that of the second, undoes each, and ends the training.

    Args:
        trainer: with the stage `batches`.
        configured: the learning rate of the run.
    """

    def __init__(self, trainer: ExactGRPOTrainer, batches: FirstBatches, configured: float) -> None:
        self.trainer, self.batches, self.configured = trainer, batches, configured
        self.steps: list[Step] = []
        self.seconds: float | None = None

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.global_step:  # the second step, whose time includes no warm-up
            seconds = time.perf_counter() - self.batches.made_at
            self.seconds = seconds / len(self.batches.batches[-1]["completion_ids"])
            self.steps = self.line(kwargs["optimizer"])
            control.should_training_stop = True
        self.trainer.step_update.drop_gradients(self.trainer.model)

    def line(self, optimizer: Any) -> list[Step]:
        """Return steps in the order of their rates."""
        weights = [weight for weight in self.trainer.model.parameters() if weight.requires_grad]
        saved = [weight.detach().to("cpu", copy=True) for weight in weights]
        offloaded = self.trainer.step_update.offloaded
        gradients = (set(offloaded.waiting), offloaded.scale) if offloaded else None
        batches = self.batches.batches  # held-out completions, and those of the gradient
        before = [log_probs(self.trainer, batch) for batch in batches]

        def at(rate: float) -> Step:
            for group in optimizer.param_groups:
                group["lr"] = rate
            if offloaded and gradients:
                offloaded.waiting, offloaded.scale = set(gradients[0]), gradients[1]
            optimizer.step()
            changes = [log_probs(self.trainer, batch) - old for batch, old in zip(batches, before, strict=True)]
            with torch.no_grad():
                for weight, value in zip(weights, saved, strict=True):
                    weight.copy_(value)
            optimizer.state.clear()  # each step is the first one
            return Step(rate, kl_of(batches[0], changes[0]), gain_of(batches[1], changes[1]))

        return along(at, self.configured)


def along(at: Callable[[float], Step], configured: float) -> list[Step]:
    """Return steps from little change to much, and at the configured rate; none where no rate changes the policy."""

    def kl(step: Step) -> float:
        return math.inf if step.kl is None else step.kl

    rate, step = START, at(START)
    while kl(step) < LOWEST / 1000 and rate < WIDEST:  # lost in rounding
        rate *= 100
        step = at(rate)
    while kl(step) > HIGHEST and rate > START * 1e-6:
        rate /= 100
        step = at(rate)
    if not LOWEST * 1e-6 < kl(step) <= HIGHEST:
        return []
    steps = [at(configured)] if configured > 0 else []
    power = math.floor(math.log(rate * math.sqrt(LOWEST / kl(step)), SPACING))  # KL grows with the square of the rate
    while SPACING**power < WIDEST:
        steps.append(at(SPACING**power))
        power += 1
        if kl(steps[-1]) > HIGHEST:
            break
    return sorted(steps, key=lambda step: step.rate)


def log_probs(trainer: ExactGRPOTrainer, batch: Batch) -> torch.Tensor:
    """Return the log-probabilities of completions by the policy, (completions, length); 0 for tokens of others."""
    with torch.no_grad():
        scores = trl.score(trainer, trainer.model, *as_sequences(batch), batch_size=1, **images_of(batch))
    return scores[0].float().where(loss_mask(batch).bool(), 0.0).cpu()


def kl_of(batch: Batch, change: torch.Tensor) -> float | None:
    """Return the KL divergence of the policy that sampled to the changed one, nats per token; None if it is infinite.

    The estimator k3 of Schulman (2020, http://joschu.net/blog/kl-approx.html), which is never negative.

    Args:
        change: of log-probabilities, (completions, length).
    """
    change = change.double()
    kl = float((change.exp() - 1 - change).sum() / max(1, int(loss_mask(batch).sum())))
    return kl if math.isfinite(kl) else None


def gain_of(batch: Batch, change: torch.Tensor) -> float:
    """Return the mean change of completions better than their group, minus that of worse ones, nats; 0 without any."""
    advantages = batch["advantages"].double().cpu()
    advantages = advantages[:, 0] if advantages.dim() == 2 else advantages
    parts = advantages * change.double().sum(1)
    better, worse = float(advantages.clamp(min=0).sum()), float((-advantages).clamp(min=0).sum())
    gain = float(parts[advantages > 0].sum()) / (better or 1.0) + float(parts[advantages < 0].sum()) / (worse or 1.0)
    return gain if math.isfinite(gain) else 0.0


def read_step(folder: Path, config: DictConfig) -> FirstStep | None:
    """Return the first step that a call has written; None if there is none of this configuration, or it is torn."""
    content = read_json(folder / FILE)
    if content.pop("key", None) != digest_of(config):
        return None
    return FirstStep(**content | {"steps": [Step(**step) for step in content["steps"]]})


def write_step(folder: Path, config: DictConfig, step: FirstStep) -> None:
    """Write a first step for the next call of the same command."""
    write_json(folder / FILE, {"key": digest_of(config), **asdict(step)})


def digest_of(config: DictConfig) -> str:
    """Return a fingerprint of all that decides a step."""
    content: Any = OmegaConf.to_container(config, resolve=True)
    return hashlib.sha256(json.dumps({**content, "preflight": None}, default=str).encode()).hexdigest()[:24]
