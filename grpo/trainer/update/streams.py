"""Order between the stream that this process works on and the one that bitsandbytes steps on.

bitsandbytes 0.50 launches its optimizers on CUDA's default stream, whatever PyTorch's current stream is. vLLM, in the
same process, makes another stream the current one (`vllm.utils.torch_utils.current_stream`), and streams do not wait
for each other by themselves: a step could see gradients that are not clipped yet, and the next forward pass weights
that are not written yet.
"""

from typing import Any

import torch


def step_on_default_stream(optimizer: torch.optim.Optimizer) -> None:
    """Let each step of an optimizer wait for the current stream, and the current stream for the step."""

    def wait_for_gradients(*args: Any) -> None:
        torch.cuda.default_stream().wait_stream(torch.cuda.current_stream())

    def wait_for_weights(*args: Any) -> None:
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())

    optimizer.register_step_pre_hook(wait_for_gradients)
    optimizer.register_step_post_hook(wait_for_weights)
