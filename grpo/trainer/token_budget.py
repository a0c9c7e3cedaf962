"""The number of tokens that a micro-batch may have: it grows with free memory and halves after an OOM."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate.utils.memory import clear_device_cache

from grpo.utils.atomic import atomic
from grpo.utils.distributed import is_main_process, rank
from grpo.utils.limits import UNMEASURED, USABLE, held_back


class TokenBudget:
    """`max_tokens_per_microbatch` during a run: it grows while memory allows, and halves after an OOM."""

    def __init__(self, setting: int | str, device: torch.device, file: Path | None = None) -> None:
        """Begin with a number of tokens, or with `auto`: the longest possible sequence first.

        Args:
            file: keeps what did not fit where the process cannot go on after an OOM, for the next one; processes but
                rank 0 write files of similar names.
        """
        self.setting = setting
        self.measured = setting == "auto" and device.type == "cuda"  # of this process's GPU, the current device
        self.tokens = setting if isinstance(setting, int) else UNMEASURED
        self.ceiling: float = float("inf")
        self.begun = not self.measured
        self.asleep: Callable[[], int] = lambda: 0  # bytes that PyTorch counts and a sleeping engine has freed
        self.occupied = 0
        self.retries = 0
        """Times that memory has run out and work was divided, since the last log."""
        self.file = file
        self.most: float = float("inf")
        for noted in file.parent.glob(f"{file.stem}*{file.suffix}") if file else ():  # by any process
            with contextlib.suppress(ValueError, TypeError, KeyError):  # torn or foreign: a restart has to begin
                self.most = min(self.most, max(1, int(json.loads(noted.read_bytes())["tokens"]) // 2))

    def begin(self, longest: int) -> None:
        """Start `auto` at the longest possible sequence, of so many tokens."""
        self.begun, self.tokens = True, longest

    def halve(self, tokens: int) -> None:
        """After an OOM at a micro-batch of so many tokens, halve the budget and free cached memory."""
        self.tokens = max(1, min(self.tokens, tokens) // 2)
        self.ceiling = min(self.ceiling, tokens)
        self.retry()

    def forbid(self, tokens: int) -> str:
        """Note, for the processes that continue the run, that so many tokens do not fit; return what to do.

        With sharded weights all processes gather each layer together: when one fails within a micro-batch, the others
        already wait for its part of the next layer, and nothing ends that wait but the end of the process, unless its
        layers finish the micro-batch (`grpo.trainer.update.finished_layers`).
        """
        if self.file:  # several processes can fail in the same step: a file for each, of which the least counts
            file = self.file if is_main_process() else self.file.with_name(f"{self.file.stem}.{rank()}.json")
            with atomic(file) as partial:
                partial.write_text(json.dumps({"tokens": tokens}))
        return (
            f"out of memory in the update, at {tokens} tokens at once, with sharded weights, whose processes cannot "
            f"repeat a step here; continued, the run takes at most {tokens // 2}, and with launch.max_restarts it "
            "continues by itself; or lower update.max_tokens_per_microbatch, or use shard=fsdp2 with "
            "train.gradient_checkpointing=true, whose layers let them repeat it"
        )

    def allowed(self) -> int:
        """Return the number of tokens that a micro-batch may have, after what an earlier process could not hold."""
        return int(min(self.tokens, self.most))

    def retry(self) -> None:
        """Count an OOM after which work is divided, and free cached memory."""
        self.retries += 1
        self.release()

    def release(self) -> None:
        """Free cached memory."""
        clear_device_cache(garbage_collection=True)

    def watch(self) -> None:
        """Begin to measure the memory of an update."""
        if self.measured:
            torch.cuda.reset_peak_memory_stats()
            self.occupied = torch.cuda.memory_allocated() - self.asleep()

    def grow(self, largest: int) -> None:
        """After an update whose largest micro-batch had so many tokens: grow by at most two, as memory allows."""
        if self.measured and largest:
            total = torch.cuda.get_device_properties().total_memory * torch.cuda.get_per_process_memory_fraction()
            total -= held_back()
            self.tokens = self.grown(largest, torch.cuda.max_memory_allocated() - self.asleep(), total)

    def grown(self, largest: int, peak: float, total: float) -> int:
        """Return the next budget, if `largest` tokens took the memory from `occupied` to `peak` bytes of `total`.

        What a micro-batch takes is taken to be proportional to its tokens. Never twice as much at once, never as much
        as did not fit before, and no change while micro-batches stay far below the budget.
        """
        if largest < self.tokens / 2:
            return self.tokens
        fits = largest * (USABLE * total - self.occupied) / max(1, peak - self.occupied)
        return max(self.tokens, int(min(fits, 2 * self.tokens, self.ceiling - 1)))

    def state_dict(self) -> dict:
        """Return what the next steps depend on."""
        return {"setting": self.setting, "tokens": self.tokens, "ceiling": self.ceiling, "begun": self.begun}

    def load_state_dict(self, state: dict) -> None:
        """Continue with what `state_dict` has returned, unless the setting is another one now."""
        if state["setting"] == self.setting:
            self.tokens, self.ceiling, self.begun = state["tokens"], state["ceiling"], state["begun"]
