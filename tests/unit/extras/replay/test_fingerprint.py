"""Fingerprints: bits are exact, sketches tell about by how much."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from grpo.extras.replay import fingerprint
from grpo.extras.replay.fingerprint import digest, fingerprints, measured

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.int64, torch.bool)


def of(tensor: torch.Tensor) -> fingerprint.Fingerprint:
    return fingerprints([("a", tensor)])["a"]


@given(size=some.integers(1, 300), place=some.integers(0, 299), bit=some.integers(0, 31))
def test_any_bit_changes_the_fingerprint(size: int, place: int, bit: int) -> None:
    values = torch.randn(size)
    other = values.clone()
    other.view(torch.int32)[place % size] ^= torch.tensor(1 << bit).to(torch.int32)
    assert of(values).bits != of(other).bits
    assert digest({"a": values}) != digest({"a": other})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_tensors_have_equal_fingerprints(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    values = (torch.randn(1000) * 3).to(dtype)
    whole = of(values)
    monkeypatch.setattr(fingerprint, "CHUNK", 128)
    assert of(values.clone()).bits == whole.bits
    assert of(values.view(10, 100).t().contiguous().t()).bits == whole.bits
    assert of(values).distance(whole) < 1e-6


def test_order_and_length_change_the_fingerprint() -> None:
    values = torch.tensor([1.0, 2.0, 0.0])
    others = [values.flip(0), values[:2], torch.tensor([2.0, 1.0, 0.0])]
    assert len({of(other).bits for other in [values, *others]}) == 4


def test_the_distance_of_a_single_value_is_exact() -> None:
    values = torch.randn(5000)
    other = values.clone()
    other[777] += 0.25
    assert of(values).distance(of(other)) == pytest.approx(0.25 / other.norm().item(), rel=1e-3)


def test_the_distance_of_many_values_is_about_theirs() -> None:
    torch.manual_seed(0)
    ratios = []
    for _ in range(60):
        values, apart = torch.randn(4000), torch.randn(4000) * 0.01
        true = apart.norm().item() / max(values.norm().item(), (values + apart).norm().item())
        ratios.append(of(values).distance(of(values + apart)) / true)
    assert torch.tensor(ratios).mean().item() == pytest.approx(1.0, abs=0.05)
    assert torch.tensor(ratios).std().item() < 0.15


def test_the_signs_of_a_sketch_are_balanced() -> None:
    sums = measured(torch.ones(64 * 4096))[1]
    assert sums.abs().max() < 5 * 4096**0.5
