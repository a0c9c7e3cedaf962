"""vLLM's LoRA layers on a CPU, for an engine whose requests all have the same adapter."""

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU


class OneAdapter(PunicaWrapperCPU):
    """Multiplies all tokens with the single adapter; vLLM 0.31 copies the adapter once per token of a batch."""

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **options: Any,
    ) -> None:
        """Add the adapter's part to the output of a linear layer, in place, computed in float32 as PEFT does.

        Args:
            y: output, (tokens, sum of `output_slices`).
            x: input, (tokens, inputs).
            lora_a_stacked: for each of the projections in this layer, (slots for adapters, 1, rank, inputs).
            lora_b_stacked: likewise, (slots for adapters, 1, outputs, rank).
            scale: factor of the product.
            output_slices: number of outputs of each projection.
            options: of other devices.
        """
        slot = int(self.token_lora_indices[0])
        if slot < 0:  # requests without an adapter
            return
        rows = x.reshape(-1, x.shape[-1]).float()
        parts = y.view(-1, y.shape[-1]).split(output_slices, dim=1)
        for part, down, up in zip(parts, lora_a_stacked, lora_b_stacked, strict=True):
            part.add_(rows @ down[slot, 0].float().T @ up[slot, 0].float().T, alpha=scale)
