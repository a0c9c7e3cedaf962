"""TRL's `GRPOTrainer` with the same gradient for less work, and without dying of an out-of-memory error.

The rollouts of an optimizer step are kept until all are there. The rows that matter are then sorted by length into
micro-batches, each goes through TRL's own loss, and the losses are weighted so that their sum is TRL's.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import DistributedType, gather_object

from grpo.config.schema import LOSS_MEANS, Update
from grpo.errors import DoesNotFit
from grpo.trainer.batch import Batch, loss_mask, take
from grpo.trainer.guard import GuardedTrainer
from grpo.trainer.microbatch import has_work, shares
from grpo.trainer.rollout import too_long
from grpo.trainer.step import Piece, batches_of, count, nothing, worst_case
from grpo.trainer.step_metrics import StepMetrics, merge

log = logging.getLogger(__name__)


class Alone:
    """The accelerator as in a process without others: what is gathered or reduced is its own.

    Processes have different micro-batches, and one may run out of memory: inside of one, nobody waits for another.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def gather(self, tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        return tensor

    gather_for_metrics = pad_across_processes = gather

    def reduce(self, tensor: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
        return tensor


class ExactGRPOTrainer(GuardedTrainer):
    """A drop-in for `trl.GRPOTrainer`: the same constructor, and one more argument.

    What cannot be divided exactly is computed TRL's way, `per_device_train_batch_size` rows at once:
    `top_entropy_quantile` below 1, the auxiliary loss of a router, a `loss_type` that is not in `LOSS_MEANS`, and
    optimizers that step during the backward pass (LOMO, layerwise GaLore and APOLLO).

    Args:
        update: the `update` group of the configuration; its defaults if None.
    """

    def __init__(self, *args: Any, update: Update | None = None, **kwargs: Any) -> None:
        super().__init__(*args, update=update, **kwargs)
        one_pass = self.top_entropy_quantile < 1.0 or self.aux_loss_enabled or self.loss_type not in LOSS_MEANS
        steps_in_backward = "lomo" in self.args.optim or self.args.optim.endswith("_layerwise")
        self._divisible = not (one_pass or steps_in_backward or self.args.n_gpu > 1)
        self._only_advantage_acts = self.beta == 0.0 and not self._entropy_bonus_enabled
        self._slices: list[Batch] = []

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL does. Nothing of a step that an exception ended reaches the next call."""
        self._slices, self._seen, self._part, self._rolled_out = [], [], None, False
        self._seconds.clear()
        try:
            return super().train(*args, **kwargs)
        except BaseException:
            self._step, self._buffered_inputs = 0, None  # TRL's: the next step begins with rollouts of its own
            raise

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Keep a slice of the rollouts; with the last one of the optimizer step, compute its gradient."""
        started = time.perf_counter()
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
            if self.args.torch_empty_cache_steps and self.state.global_step % self.args.torch_empty_cache_steps == 0:
                self.budget.release()
            self._step += 1
            self._current_train_step_time += time.perf_counter() - started
            if self.accelerator.sync_gradients:
                self._metrics["train"]["step_time"].append(self._current_train_step_time)
                self._current_train_step_time = 0.0
        else:
            loss = self._undivided_step(model, inputs, num_items_in_batch)
        self._seconds["step"] += time.perf_counter() - started
        if self.accelerator.sync_gradients:
            seconds, self._seconds = self._seconds, defaultdict(float)
            seconds["update"] = seconds.pop("step") - seconds.pop("rollout", 0.0)
            for phase in ("generate", "reward", "logprobs", "update"):
                self._metrics["train"][f"time/{phase}"].append(seconds[phase])
        return loss

    def _undivided_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> torch.Tensor:
        """Do a step TRL's way."""
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
        """Compute the gradient of all rows of the step, again and smaller while memory runs out; return the loss."""
        slices, self._slices = self._slices, []
        by_slice = LOSS_MEANS[self.loss_type] == "tokens" or self._entropy_bonus_enabled
        batches = batches_of(slices, mix=not by_slice)
        entropy_stats = self._entropy_window_stats
        trial = []
        if not self.budget.begun:  # `auto` on a GPU: whether the longest row fits shows in the first step
            trial = [worst_case(batches, self.max_completion_length)]
            self.budget.begin(trial[0].part.tokens)
        alone = False
        while True:
            self._seen = []
            self._entropy_window_stats = entropy_stats
            pieces = trial + self._pieces(batches)
            if self._sharded:  # every micro-batch gathers weights from all processes
                pieces += [nothing(batches)] * (self._most(len(pieces)) - len(pieces))
            step = count(batches, pieces, by_sequence=self.importance_sampling_level == "sequence")
            self.budget.watch()
            loss, failed = self._backward(model, pieces, step)
            again = alone  # a single row may fail for the fragments that others left, but not twice
            alone = failed is not None and len(failed.part.rows) == 1
            any_failed, hopeless = self._any(
                failed is not None, alone and (again or any(failed is piece for piece in trial))
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
        if self.state.global_step and pieces:  # before the first step there is no optimizer state in memory
            self.budget.grow(max(piece.part.tokens for piece in pieces))
        return loss

    def _pieces(self, batches: Sequence[tuple[Batch, int]]) -> list[Piece]:
        """Divide the rows with work into micro-batches under the token budget."""
        pieces = []
        for batch, slices in batches:
            tokens = loss_mask(batch).sum(1).tolist()
            advantages = None
            if self.update.skip_zero_advantage and self._only_advantage_acts:
                advantages = batch["advantages"].reshape(len(tokens), -1).abs().amax(1).tolist()
            rows = [row for row, work in enumerate(has_work(tokens, advantages)) if work]
            token_shares = shares(tokens)
            share = {"sequences": shares([1] * len(tokens)), "tokens": token_shares, "generation": None}
            mean = LOSS_MEANS[self.loss_type]
            for part in self._divide(batch, rows, share[mean]):
                if mean != "generation":  # TRL divides the loss of each of its slices by their number
                    part = replace(part, weight=part.weight * slices)
                counted = sum(tokens[row] for row in part.rows)
                pieces.append(Piece(batch, part, counted, sum(token_shares[row] for row in part.rows)))
        return pieces

    def _backward(self, model: Any, pieces: Sequence[Piece], step: StepMetrics) -> tuple[torch.Tensor, Piece | None]:
        """Add up the gradients of micro-batches; return the loss, and the one at which memory ran out.

        Inside, no process waits for another, so that each may run out of memory: gradients stay its own, metrics too,
        and DDP is bypassed. Only sharded weights need the others, and for them the number of micro-batches is equal.
        """
        module = model
        if self.accelerator.num_processes > 1 and not self._sharded:
            module = self.accelerator.unwrap_model(model, keep_torch_compile=False)
        gradients = self.accelerator.gradient_state
        own = nullcontext()
        if self._sharded and not gradients.plugin_kwargs.get("sync_each_batch", False):
            own = self.accelerator.no_sync(model)
        loss = torch.zeros((), device=self.accelerator.device)
        piece = None
        gradients._set_sync_gradients(False)
        try:
            with own, self._alone():
                for piece in pieces:
                    with self._recorded(piece, step):
                        loss += self._backward_one(module, piece)
        except RuntimeError as error:
            if not self._survives(error):
                raise
            return loss, piece
        finally:
            gradients._set_sync_gradients(True)
        return loss, None

    def _backward_one(self, model: Any, piece: Piece) -> torch.Tensor:
        inputs = take(piece.batch, piece.part, self.pad_to_multiple_of)
        with self.compute_loss_context_manager(), self._at(piece.part):
            loss = self.compute_loss(model, inputs) * piece.part.weight
        deepspeed = self.accelerator.distributed_type == DistributedType.DEEPSPEED
        self.accelerator.backward(loss, **({"scale_wrt_gas": False} if deepspeed else {}))
        return loss.detach()

    def _finish(self, model: Any, batches: Sequence[tuple[Batch, int]], step: StepMetrics) -> None:
        """Let all processes average their gradients, in a micro-batch that adds nothing, and log the step's metrics.

        It is also where TRL's entropy controller sees the end of the step, and what gives a gradient of zero, as in
        TRL, to weights that only skipped rows use.
        """
        metrics = self._metrics["train"]
        several = self.accelerator.num_processes > 1 or self._sharded
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
        together, self.accelerator = self.accelerator, Alone(self.accelerator)
        try:
            yield
        finally:
            self.accelerator = together

    @contextmanager
    def _recorded(self, piece: Piece, step: StepMetrics) -> Iterator[None]:
        """Put what TRL records of a micro-batch into `step`, and let its entropy bonus weigh what it has to.

        The bonus is a mean over tokens whatever the policy loss is a mean of, but both get the micro-batch's weight.
        """
        metrics, self._metrics["train"] = self._metrics["train"], defaultdict(list)
        coefficient = self.entropy_coef
        weight = piece.part.weight
        if self._entropy_bonus_enabled:
            self.entropy_coef = coefficient * piece.token_share / weight if weight else 0.0
        try:
            yield
            slices = self.current_gradient_accumulation_steps * self.accelerator.num_processes
            if weight:
                step.add(self._metrics["train"], piece.tokens, len(piece.part.rows), weight / slices)
        finally:
            self._metrics["train"], self.entropy_coef = metrics, coefficient

    def _most(self, count: int) -> int:
        """Return the largest of these numbers over all processes."""
        return int(self.accelerator.gather(torch.tensor([count], device=self.accelerator.device)).max())

    def _any(self, *flags: bool) -> list[bool]:
        """Return which of these is true on any process."""
        if self.accelerator.num_processes == 1:
            return list(flags)
        mine = torch.tensor(flags, dtype=torch.int, device=self.accelerator.device)
        return [bool(count) for count in self.accelerator.reduce(mine, "sum").tolist()]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as TRL does, with the number of steps redone and skipped and the highest memory use since last time."""
        if self.model.training and "loss" in logs:
            logs |= {"update/oom_retries": self._oom_retries, "update/steps_skipped": self._steps_skipped}
            logs |= self.memory.since_log()
            self._oom_retries = self._steps_skipped = 0
        super().log(logs, start_time)
