"""The two calls of a GPU's kernel, which stands here as its formula, against attention with a mask."""

import pytest
import torch

from grpo.trainer.shared_prompts import merged as merged_calls
from grpo.trainer.shared_prompts import varlen
from grpo.trainer.shared_prompts.layout import Group
from grpo.trainer.shared_prompts.varlen import segments_in, segments_of
from tests.flash_kernel import Kernel

CPU = torch.device("cpu")
GROUPS = {
    "two groups": (Group(0, 5, (3, 3, 4)), Group(15, 6, (2, 1))),
    "one completion, and prompts of one token": (Group(0, 6, (2,)), Group(8, 0, (2, 3)), Group(13, 3, (1, 4))),
    "nothing shared": (Group(0, 6, (2,)), Group(8, 0, (3,))),
}


def visible(groups: tuple[Group, ...]) -> torch.Tensor:
    """Which token sees which."""
    seen = torch.zeros(groups[-1].end, groups[-1].end, dtype=torch.bool)
    for group in groups:
        begin = group.start + group.prompt
        seen[group.start : group.end, group.start : begin] = True
        for length in group.completions:
            seen[begin : begin + length, begin : begin + length] = True
            begin += length
    return seen.tril()


@pytest.mark.parametrize("name", GROUPS)
def test_two_calls_are_attention_within_the_groups(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "aten", Kernel)
    groups, generator = GROUPS[name], torch.Generator().manual_seed(0)
    length = groups[-1].end
    tensors = [torch.randn(1, heads, length, 8, generator=generator) for heads in (4, 2, 2)]
    given = torch.randn(1, 4, length, 8, generator=generator)
    merged, exact = ([tensor.clone().requires_grad_() for tensor in tensors] for _ in range(2))
    monkeypatch.setattr(merged_calls, "forward_on_cpu", varlen.forward)
    monkeypatch.setattr(merged_calls, "backward_on_cpu", varlen.backward)
    mine = merged_calls.merged_attention(merged, segments_of(groups, CPU), None).transpose(1, 2)
    theirs = torch.nn.functional.scaled_dot_product_attention(*exact, visible(groups), enable_gqa=True)
    mine.backward(given)
    theirs.backward(given)
    torch.testing.assert_close(mine, theirs)
    for own, other in zip(merged, exact, strict=True):
        torch.testing.assert_close(own.grad, other.grad)


def test_the_number_of_parts_is_that_of_prompts_and_completions() -> None:
    segments = segments_in(segments_of(GROUPS["two groups"], CPU))
    assert segments.of_all.bounds.tolist() == [0, 5, 8, 11, 15, 21, 23, 24]
    assert segments.completions.tolist() == [*range(5, 15), *range(21, 24)]
    assert segments.prompts.tolist() == [*range(5), *range(15, 21)]
    assert segments.of_completions.bounds.tolist() == [0, 10, 13]
    assert segments.of_prompts.bounds.tolist() == [0, 5, 11]
