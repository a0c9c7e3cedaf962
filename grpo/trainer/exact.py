"""TRL's `GRPOTrainer` with the same gradient for less work, and without dying of an out-of-memory error.

The rollouts of an optimizer step are kept until all are there. The completions that can change the gradient are then
sorted by length into micro-batches, each goes through TRL's own loss, and the losses are weighted so that their sum is
TRL's.
"""

import logging
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType, gather_object

from grpo.config.options import LOSS_MEANS, Engine, Update
from grpo.trainer import own_loss
from grpo.trainer.balance import earliest, everyones, limits
from grpo.trainer.batch import Batch, can_move, lengths, loss_mask, take
from grpo.trainer.dynamic_sampling import DynamicSamplingTrainer
from grpo.trainer.extra_columns import keep_writable
from grpo.trainer.gradient_offload import OffloadedGradients
from grpo.trainer.guard import NonFiniteGuard
from grpo.trainer.local_accelerator import LocalAccelerator
from grpo.trainer.microbatch import cost, has_work, loss_shares
from grpo.trainer.rollout import too_long
from grpo.trainer.step import StepMicrobatch, batches_of, count, nothing, worst_case
from grpo.trainer.step_metrics import StepMetrics, merge
from grpo.trainer.streams import step_on_default_stream
from grpo.utils.errors import DoesNotFit
from grpo.utils.oom import is_out_of_memory

log = logging.getLogger(__name__)


class ExactGRPOTrainer(DynamicSamplingTrainer):
    """A drop-in for `trl.GRPOTrainer`: the same constructor with one more argument.

    Losses that cannot be divided exactly are computed TRL's way, `per_device_train_batch_size` completions at once:
    `top_entropy_quantile` below 1, the auxiliary loss of a router, a `loss_type` that is neither in `LOSS_MEANS` nor in
    `grpo.losses`, and optimizers that step during the backward pass (LOMO, layerwise GaLore and APOLLO).

    Args:
        update: the `update` group of the configuration; its defaults if None.
        engine: the `engine` group of the configuration; adapters are merged, as TRL does, if None.
        rollout: the `rollout` group of the configuration; its defaults if None.
        view: opens the images of each generation, once each; None where the data has them open.
        most_images: images of a prompt at most, for an engine of vLLM; None if it is not known.
    """

    def __init__(self, *args: Any, update: Update | None = None, engine: Engine | None = None, **kwargs: Any) -> None:
        super().__init__(*args, update=update, engine=engine, **kwargs)
        self._mean = self._own_loss.MEAN if self._own_loss else LOSS_MEANS.get(self.loss_type)
        one_pass = self.top_entropy_quantile < 1.0 or self.aux_loss_enabled or self._mean is None
        steps_in_backward = "lomo" in self.args.optim or self.args.optim.endswith("_layerwise")
        self._divisible = not (one_pass or steps_in_backward or self.args.n_gpu > 1)
        self._by_slice = self._mean == "tokens" or self._entropy_bonus_enabled
        self._only_advantage_acts = self.beta == 0.0 and not self._entropy_bonus_enabled
        self._slices: list[Batch] = []
        file = Path(self.args.output_dir) / "skipped_rows.jsonl"
        self._guard = NonFiniteGuard(file, self._tokenizer, self.update.max_skipped_steps)
        self._offloaded_gradients: OffloadedGradients | None = None
        unfit = self.accelerator.num_processes > 1 or self.args.fp16 or "schedule_free" in str(self.args.optim)
        if self.update.gradients_on_host and unfit:
            raise ValueError(
                "update.gradients_on_host works with one process, in bfloat16 or float32, and not with schedule_free "
                "optimizers: shard the gradients of several processes with FSDP or ZeRO"
            )

    @property
    def stop_reason(self) -> str | None:
        """Reason for ending the training early, if it ended early."""
        return self._guard.stop_reason

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL does. An exception leaves nothing of its step for the next call."""
        self._slices, self._guard.seen, self._part, self._rolled_out = [], [], None, False
        self._seconds.clear()
        try:
            return super().train(*args, **kwargs)
        except BaseException:
            self._step, self._buffered_inputs = 0, None  # TRL's: the next step begins with rollouts of its own
            raise

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Keep a slice of the rollouts; with the last one of the optimizer step, compute its gradient."""
        started = time.perf_counter()
        if self.is_deepspeed_enabled:  # it steps within the backward pass, and checks gradients in half precision alone
            self.deepspeed.optimizer.check_grad_overflow = True
        if self._divisible:
            model.train()
            if callable(getattr(self.optimizer, "train", None)):  # schedule-free optimizers
                self.optimizer.train()
            rollouts = self._prepare_inputs(inputs)
            dropped = {"generated_at"}
            if rollouts["generated_at"] == self.state.global_step:
                # the old policy is still the policy: its importance weight is 1, and not 1 but for the rounding between
                # two micro-batches, which in bfloat16 exceeds the clip range of GSPO
                dropped.add("old_per_token_logps")
            self._slices.append({key: value for key, value in rollouts.items() if key not in dropped})
            loss = torch.zeros((), device=self.accelerator.device)
            if self.accelerator.sync_gradients:
                with self.memory.of("update"):
                    loss = self._update_policy(model)
                    self._wait()
            if self.args.torch_empty_cache_steps and self.state.global_step % self.args.torch_empty_cache_steps == 0:
                self.budget.release()
            self._step += 1
            self._current_train_step_time += time.perf_counter() - started
            if self.accelerator.sync_gradients:
                self._metrics["train"]["step_time"].append(self._current_train_step_time)
                self._current_train_step_time = 0.0
        else:
            loss = self._undivided_step(model, inputs, num_items_in_batch)
            self._wait()
        self._seconds["step"] += time.perf_counter() - started
        if self.accelerator.sync_gradients:
            seconds, self._seconds = self._seconds, defaultdict(float)
            seconds["update"] = seconds.pop("step") - seconds.pop("rollout", 0.0)
            for phase in ("data", "generate", "reward", "logprobs", "update"):
                self._metrics["train"][f"time/{phase}"].append(seconds[phase])
        return loss

    def _undivided_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> torch.Tensor:
        """Compute a step as TRL does."""
        try:
            with self.memory.of("update"):
                return super().training_step(model, inputs, num_items_in_batch)
        except RuntimeError as error:
            if not (self._rolled_out and self._survives(error)):
                raise
            raise DoesNotFit(
                "the update does not fit into memory, and its loss cannot be divided (top_entropy_quantile below 1, a "
                "router's auxiliary loss, an unknown loss_type, LOMO, layerwise optimizers): lower "
                "per_device_train_batch_size and raise "
                "gradient_accumulation_steps, or do without"
            ) from error

    def _update_policy(self, model: Any) -> torch.Tensor:
        """Compute the gradient of the step, again with smaller micro-batches after each OOM; return the loss."""
        slices, self._slices = self._slices, []
        batches = batches_of(slices, mix=not self._by_slice)
        entropy_stats = self._entropy_window_stats
        trial = []
        if not self.budget.begun:  # `auto` on a GPU: the first step shows whether the longest sequence fits
            trial = [worst_case(batches, self.max_completion_length)]
            self.budget.begin(trial[0].part.tokens)
        alone = False
        while True:
            self._guard.seen = []
            self._entropy_window_stats = entropy_stats
            microbatches = trial + self._microbatches(batches)
            if self.sharded:  # every micro-batch gathers weights from all processes
                microbatches += [nothing(batches)] * (max(self._of_all(len(microbatches))) - len(microbatches))
            step = count(batches, microbatches, by_sequence=self.importance_sampling_level == "sequence")
            self.memory.note()  # measuring forgets earlier peaks, also those of a pass that ran out of memory
            self.budget.watch()
            started = time.perf_counter()
            loss, failed = self._backward(model, microbatches, step)
            self._wait()
            step.seconds = [time.perf_counter() - started]
            again = alone  # one sequence may run out of memory for the fragments of others, but not twice
            alone = failed is not None and len(failed.part.rows) == 1
            any_failed, hopeless = self._any(
                failed is not None, alone and (again or any(failed is microbatch for microbatch in trial))
            )
            if not any_failed:
                break
            if hopeless:
                raise DoesNotFit(too_long(failed.part if failed else None))
            self._drop_gradients(model)
            self.budget.halve(failed.part.tokens if failed else self.budget.tokens)
            log.warning("out of memory in the update: at most %d tokens at once from now on", self.budget.tokens)
            self._oom_retries += 1
            trial = []
        self._finish(model, batches, step)
        if self.state.global_step and microbatches:  # before the first step there is no optimizer state in memory
            self.budget.grow(max(microbatch.part.tokens for microbatch in microbatches))
        return loss

    def _microbatches(self, batches: Sequence[tuple[Batch, int]]) -> list[StepMicrobatch]:
        """Divide the sequences that can change the gradient into micro-batches; return those of this process.

        Where the loss allows it, the sequences of all processes are divided, and each process gets as much work.
        """
        processes = self.accelerator.num_processes
        self.budget.tokens = min(self._of_all(self.budget.allowed()))  # all then divide alike
        (own,) = self._any(self._by_slice or not all(can_move(batch) for batch, _ in batches))
        if processes == 1 or own:
            return self._divided(batches, self.budget.tokens)
        everyone = [(everyones(self.accelerator, batch), slices * processes) for batch, slices in batches]
        tokens = sum(map(sum, (length for batch, _ in everyone for length in lengths(batch))))
        divisions = [self._divided(everyone, limit) for limit in limits(tokens, processes, self.budget.tokens)]
        costs = [[cost([one.part], self.budget.tokens, self._hidden_size) for one in parts] for parts in divisions]
        chosen, dealt = earliest(costs, processes, in_rounds=self.sharded)
        return [divisions[chosen][index] for index in dealt[self.accelerator.process_index]]

    def _divided(self, batches: Sequence[tuple[Batch, int]], limit: int) -> list[StepMicrobatch]:
        """Divide the sequences that can change the gradient into micro-batches of at most so many tokens."""
        microbatches = []
        for batch, slices in batches:
            tokens = loss_mask(batch).sum(1).tolist()
            advantages = None
            if self.update.skip_zero_advantage and self._only_advantage_acts:
                advantages = batch["advantages"].reshape(len(tokens), -1).abs().amax(1).tolist()
            rows = [row for row, work in enumerate(has_work(tokens, advantages)) if work]
            token_shares = loss_shares(tokens)
            share = {"sequences": loss_shares([1] * len(tokens)), "tokens": token_shares}.get(str(self._mean))
            for part in self._divide(batch, rows, limit, share):
                if self._mean != "generation":  # TRL divides the loss of each of its slices by their number
                    part = replace(part, weight=part.weight * slices)
                counted = sum(tokens[row] for row in part.rows)
                microbatches.append(StepMicrobatch(batch, part, counted, sum(token_shares[row] for row in part.rows)))
        return microbatches

    def _backward(
        self, model: Any, microbatches: Sequence[StepMicrobatch], step: StepMetrics
    ) -> tuple[torch.Tensor, StepMicrobatch | None]:
        """Add up the gradients of micro-batches; return the loss, and the micro-batch that ran out of memory, if any.

        No process waits for another here, so that each may run out of memory alone: gradients and metrics stay local,
        and DDP is bypassed. Sharded weights need all processes, so that each has as many micro-batches; their gradients
        are reduced and sharded after each, so that no process holds whole ones.
        """
        module = model
        if self.accelerator.num_processes > 1 and not self.sharded:
            module = self.accelerator.unwrap_model(model, keep_torch_compile=False)
        gradients = self.accelerator.gradient_state
        loss = torch.zeros((), device=self.accelerator.device)
        microbatch = None
        gradients._set_sync_gradients(False)
        try:
            with self._alone():
                for microbatch in microbatches:
                    with self._recorded(microbatch, step):
                        loss += self._backward_one(module, microbatch)
        except RuntimeError as error:
            if self.sharded and microbatch and is_out_of_memory(error):
                raise DoesNotFit(self.budget.forbid(microbatch.part.tokens)) from error
            if not self._survives(error):
                raise
            return loss, microbatch
        finally:
            gradients._set_sync_gradients(True)
        return loss, None

    def _backward_one(self, model: Any, microbatch: StepMicrobatch) -> torch.Tensor:
        inputs = take(microbatch.batch, microbatch.part, self.pad_to_multiple_of)
        with self.compute_loss_context_manager(), self._at(microbatch.part):
            loss = self.compute_loss(model, inputs) * microbatch.part.weight
        deepspeed = self.accelerator.distributed_type == DistributedType.DEEPSPEED
        self.accelerator.backward(loss, **({"scale_wrt_gas": False} if deepspeed else {}))
        return loss.detach()

    def _finish(self, model: Any, batches: Sequence[tuple[Batch, int]], step: StepMetrics) -> None:
        """Average the gradients of all processes, in a micro-batch that adds nothing, and log the metrics of the step.

        The micro-batch also shows TRL's entropy controller the end of the step, and gives a gradient of zero, as in
        TRL, to weights that only skipped completions use.
        """
        metrics = self._metrics["train"]
        several = self.accelerator.num_processes > 1 or self.sharded
        images_skipped = step.skipped and "pixel_values" in batches[0][0]
        if several or images_skipped or self._entropy_bonus_enabled or not step.microbatches:
            self._metrics["train"] = defaultdict(list)
            self._backward_one(model, nothing(batches))
            recorded, self._metrics["train"] = self._metrics["train"], metrics
            if self._entropy_bonus_enabled:
                metrics["entropy_coef"] += recorded.pop("entropy_coef")
            step.add(recorded, tokens=0, rows=0, policy_weight=0.0)
        if self.accelerator.num_processes > 1:
            step = merge(gather_object([step]))
        for name, value in step.result().items():
            metrics[name].append(value)
        metrics["update/max_tokens_per_microbatch"].append(self.budget.tokens)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        together, self.accelerator = self.accelerator, LocalAccelerator(self.accelerator)
        try:
            yield
        finally:
            self.accelerator = together

    @contextmanager
    def _recorded(self, microbatch: StepMicrobatch, step: StepMetrics) -> Iterator[None]:
        """Add the metrics that TRL records of a micro-batch to `step`, and weigh its entropy bonus.

        The bonus is a mean over tokens whatever the policy loss is a mean of, but both get the micro-batch's weight.
        """
        metrics, self._metrics["train"] = self._metrics["train"], defaultdict(list)
        coefficient = self.entropy_coef
        weight = microbatch.part.weight
        if self._entropy_bonus_enabled:
            self.entropy_coef = coefficient * microbatch.token_share / weight if weight else 0.0
        try:
            yield
            slices = self.current_gradient_accumulation_steps * self.accelerator.num_processes
            if weight:
                step.add(self._metrics["train"], microbatch.tokens, len(microbatch.part.rows), weight / slices)
        finally:
            self._metrics["train"], self.entropy_coef = metrics, coefficient

    def compute_loss(self, model: Any, inputs: Batch, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return TRL's loss, or one of `grpo.losses`; its batch is kept until the gradient is known to be finite."""
        if self._own_loss:
            loss = own_loss.compute_loss(self, self._own_loss, model, inputs)
        else:
            loss = super().compute_loss(model, inputs, *args, **kwargs)
        if torch.is_grad_enabled() and self._logps is not None:
            self._guard.note(inputs, loss, self._logps)
        return loss

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Create the optimizer; with `update.gradients_on_host` its gradients are offloaded to CPU."""
        optimizer = super().create_optimizer(*args, **kwargs)
        if self.accelerator.device.type == "cuda" and type(optimizer).__module__.startswith("bitsandbytes"):
            step_on_default_stream(optimizer)
        if self.update.gradients_on_host and self._offloaded_gradients is None:
            self._offloaded_gradients = OffloadedGradients(self.model, optimizer)
        return optimizer

    def _clip_grad_norm(self, model: Any) -> Any:
        if self._offloaded_gradients:
            return self._offloaded_gradients.clip(self.args.max_grad_norm)
        return super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Return the norm; if it is not finite, drop all gradients, so that the optimizer's step changes nothing."""
        if self._offloaded_gradients and grad_norm is None:
            grad_norm = self._offloaded_gradients.clip(math.inf)
        grad_norm = super()._get_grad_norm(model, grad_norm)
        # in float16 a loss scale that is still to be found overflows too, and is halved each time
        searching = self.accelerator.scaler is not None and self.accelerator.scaler.get_scale() > 1
        if not self._guard.passes(grad_norm, self.state.global_step + 1, searching):
            self._drop_gradients(model)
            if self.stop_reason:
                self.control.should_training_stop = self.control.should_save = True
        return grad_norm

    def _drop_gradients(self, model: Any) -> None:
        if not self.is_deepspeed_enabled:  # which drops them itself
            model.zero_grad(set_to_none=True)
        if self._offloaded_gradients:
            self._offloaded_gradients.drop()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as TRL does, with the steps repeated and skipped and the peak of memory since the last log."""
        if self.model.training and "loss" in logs:
            logs |= {"update/oom_retries": self._oom_retries, "update/steps_skipped": self._guard.skipped}
            logs |= self.memory.since_log()
            self._oom_retries = self._guard.skipped = 0
        keep_writable(self._logs["extra"])
        super().log(logs, start_time)
