"""LoRA layers on a CPU beside those of vLLM."""

from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.vllm
TOKENS, INPUTS, RANK = 5, 12, 4
OUTPUTS = (8, 4, 4)
"""Of the three projections that vLLM puts into one layer."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slot", [0, 1, -1], ids=["first slot", "second slot", "no adapter"])
def test_the_output_is_exact_and_no_worse_than_that_of_vllm(slot: int, dtype: torch.dtype) -> None:
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    from grpo.generation.vllm.cpu_lora import OneAdapter

    torch.manual_seed(0)
    x, base = torch.randn(TOKENS, INPUTS).to(dtype), torch.randn(TOKENS, sum(OUTPUTS)).to(dtype)
    down = tuple(torch.randn(2, 1, RANK, INPUTS).to(dtype) for _ in OUTPUTS)
    up = tuple(torch.randn(2, 1, size, RANK).to(dtype) for size in OUTPUTS)
    products = [x.double() @ a[slot, 0].double().T @ b[slot, 0].double().T for a, b in zip(down, up, strict=True)]
    exact = base.double() + (slot >= 0) * 0.5 * torch.cat(products, 1)
    errors = []
    for kind in (PunicaWrapperCPU, OneAdapter):
        wrapper = kind(TOKENS, TOKENS, "cpu")
        mapping = SimpleNamespace(index_mapping=(slot + 1,) * TOKENS, prompt_mapping=(slot + 1,), is_prefill=True)
        wrapper.update_metadata(mapping, [1, 2], 2, 100)
        y = base.clone()
        wrapper.add_lora_linear(y, x, down, up, 0.5, OUTPUTS)
        errors.append(float((y - exact).abs().max()))
    stock, ours = errors
    assert ours <= max(stock, 1e-6)
    assert ours <= torch.finfo(dtype).eps * float(exact.abs().max())
