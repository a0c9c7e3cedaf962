"""From the completions of an optimizer step to its gradient, in micro-batches that fit into memory."""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from accelerate.utils import DistributedType, gather_object

from grpo.options import Update
from grpo.trainer import trl
from grpo.trainer.batch import Batch, loss_mask, take
from grpo.trainer.compiled_layers import CompiledLayers
from grpo.trainer.measurements import MemoryReadings
from grpo.trainer.microbatch import cost, has_work, loss_fractions, too_long
from grpo.trainer.packing import Packing
from grpo.trainer.processes import any_of, of_all, read
from grpo.trainer.shared_prompts.attention import shared_attention
from grpo.trainer.token_budget import TokenBudget
from grpo.trainer.update.balance import earliest, limits
from grpo.trainer.update.finished_layers import FinishedLayers
from grpo.trainer.update.gathering import can_move, everyones
from grpo.trainer.update.gradient_offload import OffloadedGradients
from grpo.trainer.update.guard import NonFiniteGuard
from grpo.trainer.update.step import StepMicrobatch, batches_of, count, nothing, worst_case
from grpo.trainer.update.step_metrics import StepMetrics, merge
from grpo.trainer.update.traits import LossTraits
from grpo.utils.device import wait_for
from grpo.utils.errors import DoesNotFit
from grpo.utils.oom import is_out_of_memory, smaller_until_it_fits

log = logging.getLogger(__name__)
Metrics = dict[str, list[Any]]
"""Numbers, and scalars on the device."""
Loss = Callable[[Any, Batch, StepMicrobatch, bool], tuple[torch.Tensor, Metrics]]
"""From a policy, the inputs of a micro-batch, the micro-batch, and whether no process may wait for another within it,
to the loss, unweighted, and what TRL logs."""


@dataclass
class Attempt:
    """A pass over the micro-batches of a step, which starts again after an OOM."""

    microbatches: list[StepMicrobatch] = field(default_factory=list)
    loss: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    metrics: StepMetrics = field(default_factory=lambda: StepMetrics(by_sequence=False))
    computed: list[StepMicrobatch] = field(default_factory=list)
    """The micro-batches so far that have a weight."""
    unread: list[Metrics] = field(default_factory=list)
    """Their metrics."""
    started: float = 0.0
    """By `time.perf_counter`."""
    failed: StepMicrobatch | None = None
    """The micro-batch that ran out of memory and was finished."""
    alone: bool = False
    """Whether the attempt before failed at a single sequence."""
    uncompiled: bool = False
    """Whether the attempt before failed in compiled layers, not for lack of memory."""


class StepUpdate:
    """Computes the gradient of a step.

    Args:
        options: the `update` group of the configuration.
        traits: of the loss.
        loss: computes that of a micro-batch.
        accelerator: of accelerate.
        budget: tokens of a micro-batch; shared with the scoring of rollouts.
        packing: how sequences become micro-batches.
        memory: gets the peak of each attempt.
        guard: is shown whether the gradient is finite.
        longest: tokens of the longest completion.
        sharded: whether each process has a part of the weights.
        survives: whether to try again after an exception.
        compiled: the layers of the policy, where they are compiled.
        finished: the layers of a sharded policy, where they finish a micro-batch after an OOM.
    """

    def __init__(
        self,
        options: Update,
        traits: LossTraits,
        loss: Loss,
        *,
        accelerator: Any,
        budget: TokenBudget,
        packing: Packing,
        memory: MemoryReadings,
        guard: NonFiniteGuard,
        longest: int,
        sharded: bool = False,
        survives: Callable[[BaseException], bool] = is_out_of_memory,
        compiled: CompiledLayers | None = None,
        finished: FinishedLayers | None = None,
    ) -> None:
        self.options, self.traits, self.loss, self.accelerator = options, traits, loss, accelerator
        self.budget, self.packing, self.memory, self.guard = budget, packing, memory, guard
        self.longest, self.sharded, self.survives = longest, sharded, survives
        self.compiled, self.finished = compiled, finished
        self.offloaded: OffloadedGradients | None = None
        """The gradients, where `update.gradients_on_host` has them on the CPU."""

    def gradient(
        self,
        model: Any,
        slices: Sequence[Batch],
        restart: Callable[[], None] = lambda: None,
        grow: bool = True,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Add the gradient of a step to that of the model's weights; return the loss and the metrics of the step.

        Args:
            model: as accelerate has prepared it.
            slices: the completions of this process, as TRL divides them.
            restart: is called before each attempt.
            grow: whether the largest micro-batch shows how much memory more tokens would take. Before the first step of
                an optimizer its state is not in memory.
        """
        batches = batches_of(slices, mix=not self.traits.by_slice)
        first = [] if self.budget.begun else [worst_case(batches, self.longest)]
        if first:  # `auto` on a GPU: the first step shows whether the longest sequence fits
            self.budget.begin(first[0].part.tokens)
        local, attempt = self.local(model), Attempt()

        def divided() -> list[StepMicrobatch]:
            restart()
            self._begin(attempt, batches, first + self._microbatches(batches))
            return attempt.microbatches

        def backward(microbatch: StepMicrobatch) -> None:
            loss, metrics = self._backward(local, microbatch, alone=True)
            if self.finished and self.finished.error and not attempt.failed:
                attempt.failed = microbatch
            attempt.loss = attempt.loss + loss
            if microbatch.part.weight:
                attempt.computed.append(microbatch)
                attempt.unread.append(metrics)

        def survives(error: RuntimeError) -> bool:
            attempt.uncompiled = self.compiled is not None and self.compiled.gives_up(error)
            return attempt.uncompiled or self.survives(error)

        shrink, anywhere = partial(self._shrink, model, attempt), partial(self._anywhere, attempt)
        smaller_until_it_fits(divided, backward, shrink, advice, survives, anywhere)
        parts = len(slices) * self.accelerator.num_processes
        for microbatch, values in zip(attempt.computed, read(attempt.unread), strict=True):
            attempt.metrics.add(values, microbatch.tokens, len(microbatch), microbatch.part.weight / parts)
        metrics = self._average(model, batches, attempt.metrics)
        if self.accelerator.is_fsdp2:
            complete_gradients(model)
        if grow and attempt.microbatches:
            self.budget.grow(max(microbatch.part.tokens for microbatch in attempt.microbatches))
        return attempt.loss, metrics

    def _begin(
        self, attempt: Attempt, batches: Sequence[tuple[Batch, int]], microbatches: list[StepMicrobatch]
    ) -> None:
        self.guard.reset()
        if self.sharded:  # every micro-batch gathers weights from all processes
            most = max(of_all(self.accelerator, len(microbatches)))
            microbatches += [nothing(batches)] * (most - len(microbatches))
        attempt.microbatches = microbatches
        attempt.loss = torch.zeros((), device=self.accelerator.device)
        attempt.computed, attempt.unread, attempt.failed, attempt.uncompiled = [], [], None, False
        if self.finished:
            self.finished.error = None
        attempt.metrics = count(batches, microbatches, by_sequence=self.traits.by_sequence)
        self.memory.note()  # measuring forgets earlier peaks, also those of an attempt that ran out of memory
        self.budget.watch()
        attempt.started = time.perf_counter()

    def _anywhere(self, attempt: Attempt, *flags: bool) -> list[bool]:
        """Return which of these is true on any process, and note how long this one took before it waits for others."""
        wait_for(self.accelerator.device)
        attempt.metrics.seconds = [time.perf_counter() - attempt.started]
        failed, hopeless = flags
        if attempt.failed:  # and finished, so that no exception has told
            failed, hopeless = True, attempt.alone and len(attempt.failed) == 1
            attempt.alone = len(attempt.failed) == 1
        return any_of(self.accelerator, failed, hopeless)

    def _shrink(self, model: Any, attempt: Attempt, failed: StepMicrobatch | None) -> None:
        self.drop_gradients(model)
        if attempt.uncompiled:
            return
        self.budget.halve(failed.part.tokens if failed else self.budget.tokens)
        log.warning("out of memory in the update: at most %d tokens at once from now on", self.budget.tokens)

    def _microbatches(self, batches: Sequence[tuple[Batch, int]]) -> list[StepMicrobatch]:
        """Divide the sequences that can change the gradient into micro-batches; return those of this process.

        Where the loss allows it, the sequences of all processes are divided, and each process gets as much work.
        """
        processes = self.accelerator.num_processes
        self.budget.tokens = min(of_all(self.accelerator, self.budget.allowed()))  # all then divide alike
        alone = processes == 1 or self.traits.by_slice or self.traits.router
        alone = alone or not self.packing.trims  # each process has its own padding
        if alone or not can_move(self.accelerator, [batch for batch, _ in batches], self.sharded):
            return self._divided(batches, self.budget.tokens)
        everyone = [(everyones(self.accelerator, batch), slices * processes) for batch, slices in batches]
        for batch, _ in everyone:
            self.packing.shared_prompts.agree(batch)
        divisions = [self._divided(everyone, self.budget.tokens)]
        tokens = sum(microbatch.part.tokens for microbatch in divisions[0])
        smaller = limits(tokens, processes, self.budget.tokens)[1:]
        divisions += [self._divided(everyone, limit) for limit in smaller]
        size = self.packing.hidden_size
        costs = [[cost([microbatch.part], self.budget.tokens, size) for microbatch in choice] for choice in divisions]
        chosen, dealt = earliest(costs, processes, in_rounds=self.sharded)
        return [divisions[chosen][index] for index in dealt[self.accelerator.process_index]]

    def _divided(self, batches: Sequence[tuple[Batch, int]], limit: int) -> list[StepMicrobatch]:
        """Divide the sequences that can change the gradient into micro-batches of at most so many tokens."""
        only_advantage_acts = not (self.traits.penalty or self.traits.entropy_bonus)
        microbatches = []
        for batch, slices in batches:
            tokens = loss_mask(batch).sum(1).tolist()
            advantages = None
            if self.options.skip_zero_advantage and only_advantage_acts:
                advantages = batch["advantages"].reshape(len(tokens), -1).abs().amax(1).tolist()
            rows = [row for row, work in enumerate(has_work(tokens, advantages)) if work or self.traits.router]
            token_fractions = loss_fractions(tokens)
            sequences = loss_fractions([1] * len(tokens))
            weights = {"sequences": sequences, "tokens": token_fractions}.get(str(self.traits.mean))
            for part in self.packing.divide(batch, rows, limit, weights):
                if self.traits.router and not part.weight:  # no token of the policy's loss
                    part = replace(part, weight=1.0)
                if self.traits.mean != "generation":  # TRL divides the loss of each of its slices by their number
                    part = replace(part, weight=part.weight * slices)
                counted = sum(tokens[row] for row in part.rows)
                fraction = sum(token_fractions[row] for row in part.rows)
                microbatches.append(StepMicrobatch(batch, part, counted, fraction))
        return microbatches

    def local(self, model: Any) -> Any:
        """Return what computes a micro-batch on this process: no process waits for another, so DDP is bypassed.

        Sharded weights need all processes, so that each has as many micro-batches; their gradients are reduced and
        sharded after each, so that no process holds whole ones.
        """
        if self.accelerator.num_processes == 1 or self.sharded:
            return model
        return self.accelerator.unwrap_model(model, keep_torch_compile=False)

    def _backward(self, model: Any, microbatch: StepMicrobatch, alone: bool) -> tuple[torch.Tensor, Metrics]:
        """Add the gradient of a micro-batch; return its loss as a part of the step's, and what TRL logs.

        Args:
            alone: whether the gradient stays on this process, and no process waits for another.
        """
        inputs = take(microbatch.batch, microbatch.part, self.packing.multiple)
        deepspeed = self.accelerator.distributed_type == DistributedType.DEEPSPEED
        trl.synchronize_gradients(self.accelerator, not alone)
        try:
            finished = self.finished.on(model) if self.finished else nullcontext()
            compiled = self.compiled.on(model) if self.compiled else nullcontext()
            with shared_attention(model) if microbatch.part.shared else nullcontext(), compiled, finished:
                loss, metrics = self.loss(model, inputs, microbatch, alone)
                loss = loss * microbatch.part.weight
                self.accelerator.backward(loss, **({"scale_wrt_gas": False} if deepspeed else {}))
        except RuntimeError as error:
            if self.sharded and is_out_of_memory(error):
                raise DoesNotFit(self.budget.forbid(microbatch.part.tokens)) from error
            raise
        finally:
            trl.synchronize_gradients(self.accelerator, True)
        return loss.detach(), metrics

    def _average(self, model: Any, batches: Sequence[tuple[Batch, int]], step: StepMetrics) -> dict[str, float]:
        """Average the gradients of all processes, in a micro-batch that adds nothing; return the metrics of the step.

        The micro-batch also shows TRL's entropy controller the end of the step, and gives a gradient of zero, as in
        TRL, to weights that only skipped completions use.
        """
        coefficients = {}
        several = self.accelerator.num_processes > 1 or self.sharded
        images_skipped = step.skipped and "pixel_values" in batches[0][0]
        if several or images_skipped or self.traits.entropy_bonus or not step.microbatches:
            _, metrics = self._backward(model, nothing(batches), alone=False)
            if self.traits.entropy_bonus:
                (coefficients["entropy_coef"],) = metrics.pop("entropy_coef")
            step.add(metrics, tokens=0, rows=0, policy_weight=0.0)
        if self.accelerator.num_processes > 1:
            step = merge(gather_object([step]))
        return coefficients | step.result() | {"update/max_tokens_per_microbatch": self.budget.tokens}

    def state_dict(self) -> dict[str, Any]:
        """Return what the next steps depend on."""
        trials = dict(self.packing.shared_prompts.results)  # which other data, or another machine, may show otherwise
        return {"budget": self.budget.state_dict(), "guard": self.guard.state_dict(), "trials": trials}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with what `state_dict` has returned."""
        self.budget.load_state_dict(state["budget"])
        self.guard.load_state_dict(state["guard"])
        self.packing.shared_prompts.results |= state.get("trials", {})  # which version 0.2.0 did not save

    def drop_gradients(self, model: Any) -> None:
        """Drop the gradients, so that a step of the optimizer changes nothing."""
        if self.accelerator.distributed_type != DistributedType.DEEPSPEED:  # which drops them itself
            model.zero_grad(set_to_none=True)
        if self.offloaded:
            self.offloaded.drop()


def complete_gradients(model: Any) -> None:
    """Give weights that no completion has reached a gradient of zero.

    The optimizer then has a state of each weight, without which PyTorch resumes no run that FSDP2 shards: LLaVA, for
    one, reads its tower before the last layer.
    """
    for weight in model.parameters():
        if weight.requires_grad and weight.grad is None:
            weight.grad = torch.zeros_like(weight)


def advice(failed: StepMicrobatch | None) -> str:
    """Return what to do where a sequence does not fit alone, on this process or, with None, on another."""
    return too_long(failed.part if failed else None)
