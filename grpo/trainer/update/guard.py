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

from grpo.trainer.batch import Batch, loss_mask
from grpo.utils.diagnosis import ADVICE
from grpo.utils.distributed import is_main_process

log = logging.getLogger(__name__)
KEPT = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "advantages")


@dataclass
class Seen:
    """A batch from which a loss was computed, without its large tensors."""

    batch: Batch
    loss: torch.Tensor
    finite: torch.Tensor
    """Whether all log-probabilities of a completion are finite, (sequences)."""


class NonFiniteGuard:
    """Counts steps whose gradient is not finite, keeps their completions, and decides when to stop.

    Args:
        file: gets a JSON line per suspicious completion.
        tokenizer: makes texts of their tokens.
        most: such steps in a row after which the run stops.
    """

    def __init__(self, file: Path, tokenizer: Any, most: int) -> None:
        self.file, self.tokenizer, self.most = file, tokenizer, most
        self.stop_reason: str | None = None
        self.seen: list[Seen] = []
        """The micro-batches of the step at hand."""
        self.skipped = 0
        """Skipped steps since the last log."""
        self.in_a_row = 0

    def note(self, batch: Batch, loss: torch.Tensor, logps: torch.Tensor) -> None:
        """Note a batch, its loss, and its log-probabilities (sequences, length), without waiting for the GPU."""
        fields = {key: batch[key] for key in KEPT if key in batch}
        self.seen.append(Seen(fields, loss.detach(), torch.isfinite(logps.detach()).all(1)))

    def reset(self) -> None:
        """Forget the micro-batches of a step that did not end."""
        self.seen = []

    def passes(self, grad_norm: Any, step: int, searching: bool) -> bool:
        """Return whether the gradient of a step may change the policy; if not, write down its completions.

        Args:
            grad_norm: its norm; None where it is not computed.
            searching: whether a loss scale that is still too high may be the reason, which is no reason to stop.
        """
        seen, self.seen = self.seen, []
        if grad_norm is None or math.isfinite(grad_norm):
            self.in_a_row = 0
            return True
        self.skipped += 1
        self.in_a_row += 1
        write_rows(self.file, step, seen, self.tokenizer)
        problem = f"the gradient of step {step} is not finite"
        log.warning("%s: the policy stays as it is; the completions are in %s", problem, self.file)
        if self.in_a_row >= self.most and not searching:
            self.stop_reason = f"{problem}, number {self.in_a_row} in a row; see {self.file.name}; {ADVICE}"
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return what the next steps depend on."""
        return {"in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with what `state_dict` has returned."""
        self.in_a_row = state["in_a_row"]


def suspects(step: Sequence[Seen]) -> tuple[int, list[tuple[Batch, int]]]:
    """Return the completions that may have made a gradient not finite, and how narrow the search could be.

    0: completions with a log-probability that is not finite. 1: without one, those of micro-batches whose loss is not
    finite. 2: all completions, as only the gradient overflowed.
    """
    rows = [(part, row) for part in step for row in range(part.finite.numel())]
    by_row = [(part.batch, row) for part, row in rows if not part.finite[row]]
    by_loss = [(part.batch, row) for part, row in rows if not torch.isfinite(part.loss)]
    for level, candidates in enumerate((by_row, by_loss)):
        if candidates:
            return level, candidates
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
    gathered = gather_object([(level, line) for line in lines])
    if is_main_process():
        best = min((level for level, _ in gathered), default=0)
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as stream:
            stream.writelines(line for level, line in gathered if level == best)
