"""`python -m grpo.train` where accelerate can shard over CPUs; started by torchrun.

The environment variable OUT_OF_MEMORY names a file. While it is not there, the second process runs out of memory in its
third micro-batch, and makes it. LOST_TRANSFER is the number of the transfer of weights to vLLM that does not happen.
"""

import os
from pathlib import Path
from typing import Any

import torch

from tests.sharding_on_cpus import enable


def run_out_of_memory(marker: Path) -> None:
    from grpo.trainer.update import from_trainer

    loss_of, count = from_trainer.loss_of_microbatch, 0

    def fault(*args: Any) -> Any:
        nonlocal count
        count += 1
        if count == 3 and os.environ["RANK"] == "1" and not marker.exists():
            marker.touch()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return loss_of(*args)

    from_trainer.loss_of_microbatch = fault


def lose_transfer(number: int) -> None:
    from trl.generation.vllm_generation import VLLMGeneration

    transfer, count = VLLMGeneration.sync_weights, 0

    def fault(self: VLLMGeneration) -> None:
        nonlocal count
        count += 1
        if count != number:
            transfer(self)

    VLLMGeneration.sync_weights = fault


if __name__ == "__main__":
    enable()
    if "LOST_TRANSFER" in os.environ:
        lose_transfer(int(os.environ["LOST_TRANSFER"]))
    if "OUT_OF_MEMORY" in os.environ:
        run_out_of_memory(Path(os.environ["OUT_OF_MEMORY"]))
    from grpo.train import main

    main()
