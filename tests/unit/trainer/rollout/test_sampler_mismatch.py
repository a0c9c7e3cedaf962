"""Divergences between sampler and policy, against their definitions over a small vocabulary."""

import math

import pytest
import torch

from grpo.trainer.processes import LocalAccelerator
from grpo.trainer.rollout.sampler_mismatch import divergences

NAN = float("nan")
SAMPLER, POLICY = torch.tensor([[0.5, 0.25, 0.25], [0.4, 0.4, 0.2]], dtype=torch.float64)


def measured(
    policy: torch.Tensor, sampler: torch.Tensor, mask: torch.Tensor | None = None, **weights: torch.Tensor
) -> dict:
    mask = torch.ones_like(policy, dtype=torch.int64) if mask is None else mask
    ratio = weights.get("weights", (policy - sampler).nan_to_num().exp())
    return divergences(LocalAccelerator(None), policy, sampler, ratio, mask)


def test_samples_in_proportion_give_the_exact_divergences() -> None:
    tokens = torch.tensor([0, 0, 1, 2])[:, None]  # as often as the sampler draws them
    found = measured(POLICY[tokens].log(), SAMPLER[tokens].log())
    kl, chi2 = (SAMPLER * (SAMPLER / POLICY).log()).sum().item(), (POLICY**2 / SAMPLER).sum().item() - 1
    assert [found["kl"], found["k3_kl"]] == pytest.approx([kl, kl]), "as the mean ratio is 1"
    assert [found["chi2_token"], found["chi2_seq"]] == pytest.approx([chi2, chi2]), "of sequences of one token"
    assert found["rollout_is_mean"] == pytest.approx(1)
    assert found["rollout_is_eff_sample_size"] == pytest.approx(1 / (1 + chi2))
    assert found["ppl_ratio"] == pytest.approx((SAMPLER * SAMPLER / POLICY).sum().item())


def test_sequences_multiply_ratios_and_average_logarithms() -> None:
    pairs = torch.cartesian_prod(*[torch.tensor([0, 0, 1, 2])] * 2)  # all completions of two tokens, in proportion
    found = measured(POLICY[pairs].log(), SAMPLER[pairs].log())
    chi2 = (POLICY**2 / SAMPLER).sum().item()
    assert found["chi2_token"] == pytest.approx(chi2 - 1)
    assert found["chi2_seq"] == pytest.approx(chi2**2 - 1)
    ppl = sum(p * q * (p * q) ** -0.5 for p in SAMPLER for q in SAMPLER)
    assert found["rollout_ppl"] == pytest.approx(float(ppl))
    assert found["log_ppl_diff"] == pytest.approx(found["kl"])


def test_tokens_outside_the_loss_and_unscored_ones_do_not_count() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0]])
    policy = torch.tensor([[-1.0, -2.0, -9.0], [-1.0, -5.0, -1.0], [-7.0, -7.0, -7.0]])
    sampler = torch.tensor([[-1.0, -1.0, 0.0], [-2.0, NAN, -1.0], [NAN, -1.0, 0.0]])
    found = measured(policy, sampler, mask)
    assert found["kl"] == pytest.approx((0 + 1 - 1 + 0) / 4)
    assert found["log_ppl_diff"] == pytest.approx((0.5 - 0.5) / 2)
    assert found["training_ppl"] == pytest.approx((math.exp(1.5) + math.exp(1)) / 2)
    assert set(measured(policy, sampler, mask * 0).values()) == {0.0}, "without a token"


def test_a_ratio_of_an_impossible_token_stays_finite() -> None:
    found = measured(torch.tensor([[-1.0]]), torch.tensor([[-1000.0]]), weights=torch.tensor([[3.0]]))
    assert found["chi2_seq"] == pytest.approx(math.exp(40) - 1)
    assert found["k3_kl"] == pytest.approx(math.exp(20) - 21)


@pytest.mark.parametrize(
    ("weights", "masked", "size"),
    [([[0.0], [2.0], [0.0]], 1 / 2, 1 / 2), ([[0.0, 1.0], [0.0, 0.0], [0.0, 0.0]], 2 / 3, 1 / 3)],
    ids=["sequences", "tokens"],
)
def test_what_trls_mask_removes_is_counted_within_the_loss(weights: list, masked: float, size: float) -> None:
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]])
    found = measured(torch.zeros(3, 2), torch.zeros(3, 2), mask, weights=torch.tensor(weights))
    assert found["masked"] == pytest.approx(masked)
    assert found["rollout_is_eff_sample_size"] == pytest.approx(size), "of all, those that count"
