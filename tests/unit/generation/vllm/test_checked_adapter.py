"""An engine's frozen weights beside the policy's; its adapter is compared in test_checked_transfer.py."""

import pytest
import torch
from bitsandbytes.functional import quantize_4bit

from grpo.generation.vllm.checked_transfer import same_quantized


@pytest.mark.parametrize("other", [torch.float16, torch.float32])
def test_a_weight_quantized_in_another_precision_is_the_same(other: torch.dtype) -> None:
    weight = torch.randn(256, 512, generator=torch.Generator().manual_seed(0)) * 0.02
    policy, engine = (quantize_4bit(weight.to(dtype), quant_type="nf4")[0] for dtype in (torch.bfloat16, other))
    assert not torch.equal(policy, engine)
    assert same_quantized(engine, policy)


def test_a_weight_of_another_model_is_not_the_same() -> None:
    weight = torch.randn(256, 512, generator=torch.Generator().manual_seed(0)) * 0.02
    tuned = weight + 0.001 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))  # a twentieth
    assert not same_quantized(*(quantize_4bit(one, quant_type="nf4")[0] for one in (weight, tuned)))
