"""Steps whose gradient is not finite: they change nothing, and the completions that may cause it are kept."""

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object

from grpo.config.schema import Update
from grpo.diagnosis import ADVICE
from grpo.distributed import is_main_process
from grpo.patching import replaced
from grpo.trainer.batch import Batch, loss_mask
from grpo.trainer.gradient_offload import OffloadedGradients
from grpo.trainer.rollout import RolloutTrainer

log = logging.getLogger(__name__)
KEPT = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "advantages")


@dataclass
class Seen:
    """A batch from which a loss was computed, without its large tensors."""

    batch: Batch
    loss: torch.Tensor
    finite: torch.Tensor
    """Whether all log-probabilities of a completion are finite, (sequences)."""


def seen(batch: Batch, loss: torch.Tensor, logps: torch.Tensor) -> Seen:
    """Note a batch, its loss, and its log-probabilities (sequences, completion length), without waiting for the GPU."""
    kept = {key: batch[key] for key in KEPT if key in batch}
    return Seen(kept, loss.detach(), torch.isfinite(logps.detach()).all(1))


class GuardedTrainer(RolloutTrainer):
    """TRL's trainer, in which a gradient that is not finite changes neither weights nor optimizer state."""

    def __init__(self, *args: Any, update: Update | None = None, **kwargs: Any) -> None:
        super().__init__(*args, update=update, **kwargs)
        self.stop_reason: str | None = None
        """Reason for ending the training early, if it ended early."""
        self._seen: list[Seen] = []
        self._steps_skipped = self._skipped_in_a_row = 0
        self._offloaded_gradients: OffloadedGradients | None = None
        unfit = self.accelerator.num_processes > 1 or self.args.fp16 or "schedule_free" in str(self.args.optim)
        if self.update.gradients_on_host and unfit:
            raise ValueError(
                "update.gradients_on_host works with one process, in bfloat16 or float32, and not with schedule_free "
                "optimizers: use FSDP or ZeRO with several processes"
            )

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Create the optimizer; with `update.gradients_on_host` its gradients are offloaded to CPU."""
        optimizer = super().create_optimizer(*args, **kwargs)
        if self.update.gradients_on_host and self._offloaded_gradients is None:
            self._offloaded_gradients = OffloadedGradients(self.model, optimizer)
        return optimizer

    def _clip_grad_norm(self, model: Any) -> Any:
        if self._offloaded_gradients:
            return self._offloaded_gradients.clip(self.args.max_grad_norm)
        return super()._clip_grad_norm(model)

    def _drop_gradients(self, model: Any) -> None:
        model.zero_grad(set_to_none=True)
        if self._offloaded_gradients:
            self._offloaded_gradients.drop()

    def keep(self) -> None:
        """After an exception, write a checkpoint of the completed steps, unless there is one."""
        done = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        if self.state.global_step and not done.exists() and not self._sharded and self.args.should_save:
            try:
                with replaced(self, "store_flos", lambda: None):  # it would wait for the other processes
                    self._save_checkpoint(self.model, None)
            except Exception:  # what broke the run may break this too, and is what has to be told
                log.exception("no checkpoint of step %d could be written", self.state.global_step)

    def compute_loss(self, model: Any, inputs: Batch, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return TRL's loss; its batch is kept until the gradient is known to be finite."""
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if torch.is_grad_enabled() and self._logps is not None:
            self._seen.append(seen(inputs, loss, self._logps))
        return loss

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Return the norm; if it is not finite, drop all gradients, so that the optimizer's step changes nothing."""
        if self._offloaded_gradients and grad_norm is None:
            grad_norm = self._offloaded_gradients.clip(math.inf)
        grad_norm = super()._get_grad_norm(model, grad_norm)
        if grad_norm is None or math.isfinite(grad_norm):
            self._skipped_in_a_row = 0
        else:
            self._drop_gradients(model)
            self._steps_skipped += 1
            self._skipped_in_a_row += 1
            step = self.state.global_step + 1
            file = Path(self.args.output_dir) / "skipped_rows.jsonl"
            write_rows(file, step, self._seen, self._tokenizer)
            problem = f"the gradient of step {step} is not finite"
            log.warning("%s: the policy stays as it is; the completions are in %s", problem, file)
            # in float16 a loss scale that is still to be found overflows too, and is halved each time
            searching = self.accelerator.scaler is not None and self.accelerator.scaler.get_scale() > 1
            if self._skipped_in_a_row >= self.update.max_skipped_steps and not searching:
                self.stop_reason = f"{problem}, number {self._skipped_in_a_row} in a row; see {file.name}; {ADVICE}"
                self.control.should_training_stop = self.control.should_save = True
        self._seen = []
        return grad_norm


def suspects(step: Sequence[Seen]) -> tuple[int, list[tuple[Batch, int]]]:
    """Return the completions that may have made a gradient not finite, and how narrow the search could be.

    0: completions with a log-probability that is not finite. 1: without one, those of micro-batches whose loss is not
    finite. 2: all completions, as only the gradient overflowed.
    """
    rows = [(part, row) for part in step for row in range(part.finite.numel())]
    by_row = [(part.batch, row) for part, row in rows if not part.finite[row]]
    by_loss = [(part.batch, row) for part, row in rows if not torch.isfinite(part.loss)]
    for level, found in enumerate((by_row, by_loss)):
        if found:
            return level, found
    return 2, [(part.batch, row) for part, row in rows]


def write_rows(file: Path, step: int, seen_rows: Sequence[Seen], tokenizer: Any) -> None:
    """Append a JSON object per suspicious completion: step, prompt, completion, advantage, tokens in the loss.

    All processes have to call it; only the first writes, the completions of those with the narrowest search.
    """
    level, rows = suspects(seen_rows)
    lines = []
    for batch, row in rows:
        prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()]
        completion = batch["completion_ids"][row][batch["completion_mask"][row].bool()]
        content = {
            "step": step,
            "advantage": batch["advantages"][row].tolist(),
            "loss_tokens": int(loss_mask(batch)[row].sum()),
            "prompt": tokenizer.decode(prompt),
            "completion": tokenizer.decode(completion),
        }
        lines.append(json.dumps(content) + "\n")
    found = gather_object([(level, line) for line in lines])
    if is_main_process():
        best = min((level for level, _ in found), default=0)
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as stream:
            stream.writelines(line for level, line in found if level == best)
