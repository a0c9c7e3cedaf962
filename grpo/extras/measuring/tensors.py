"""The memory of tensors on a CPU, as PyTorch's `MemTracker` counts them."""

from typing import Any

import torch
from torch.distributed._tools.mem_tracker import MemTracker

from grpo.trainer.measurements import MemoryReadings
from grpo.utils.limits import GB

CPU = torch.device("cpu")


class PeakTracker(MemTracker):
    """Follows the total peak only; with LoRA's many modules that of every module would take hours.

    The hooks of modules are off: they fail in `torch.inference_mode`, in which completions are generated.
    """

    follows = True

    def __init__(self) -> None:
        super().__init__()
        modules: Any = self._mod_tracker
        modules._fw_pre_hook = modules._fw_post_hook = lambda *args: None

    def _update_peak_stats(self, peak_state: Any) -> None:
        if not self.follows:
            return
        for device, snapshot in self._curr_mem_snap.items():
            if self._peak_mem.get(device, 0) < snapshot["Total"]:
                self._peak_mem[device] = snapshot["Total"]
                self._peak_mem_snap[device] = dict(snapshot)

    def take_peak(self) -> int:
        """Return the peak of CPU tensors since the last call, bytes, and begin at the tensors of this moment."""
        now = self._curr_mem_snap.get(CPU, {}).get("Total", 0)
        highest = max(now, self._peak_mem.get(CPU, 0))
        self._peak_mem[CPU] = now
        return highest


class TensorReadings(MemoryReadings):
    """Reads the tensors that a tracker counts, instead of a GPU's allocator."""

    def __init__(self, tracker: PeakTracker) -> None:
        super().__init__(on_gpu=False)
        self.tracker = tracker

    def read(self) -> dict[str, float]:
        return super().read() | {"memory/peak_allocated_gb": self.tracker.take_peak() / GB}
