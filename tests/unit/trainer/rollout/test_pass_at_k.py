"""Learning by the best of k completions: its rewards against all subsets, its gradient against all outcomes."""

from itertools import combinations, product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo.options import Rollout
from grpo.trainer.rollout.advantages import normalized
from grpo.trainer.rollout.pass_at_k import best_of
from tests.stock_trl import ours

NAN = float("nan")


@given(st.lists(st.sampled_from([0.1, 0.7, 1 / 3, -2.0]), min_size=2, max_size=7), st.integers(1, 6))
def test_a_reward_is_the_mean_best_of_the_subsets_it_is_in(rewards: list[float], k: int) -> None:
    found = best_of(torch.tensor(rewards, dtype=torch.float64), len(rewards), k)
    for row, (reward, mine) in enumerate(zip(rewards, found.tolist(), strict=True)):
        with_it = [max(rewards[i] for i in s) for s in combinations(range(len(rewards)), k) if row in s]
        assert mine == pytest.approx(sum(with_it) / len(with_it) if with_it else max(rewards))
        assert all(mine == found[other] for other, same in enumerate(rewards) if same == reward)
    if k >= len(rewards):
        assert len(set(found.tolist())) == 1


def test_failed_completions_are_no_part_of_their_group() -> None:
    rewards = torch.tensor([1.0, 0.0, NAN, 0.0, NAN, NAN, 3.0, NAN])
    assert torch.equal(best_of(rewards, 4, 2).nan_to_num(-1), torch.tensor([1, 0.5, -1, 0.5, -1, -1, 3, -1]))


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_gradient_is_that_of_the_expected_best_of_k(k: int) -> None:
    n, values = 4, torch.tensor([0.0, 1.0, 0.0, 2.5], dtype=torch.float64)
    logits = torch.tensor([0.3, -1.0, 0.8, -2.0], dtype=torch.float64, requires_grad=True)
    logps = logits.log_softmax(0)
    best = sum(logps[list(some)].sum().exp() * values[list(some)].max() for some in product(range(4), repeat=k))
    (expected,) = torch.autograd.grad(best, logits, retain_graph=True)
    surrogate = torch.zeros((), dtype=torch.float64)
    for drawn in map(list, product(range(4), repeat=n)):
        advantages = normalized(best_of(values[drawn], n, k), n, "none")
        surrogate = surrogate + logps[drawn].sum().exp().detach() * (advantages * logps[drawn]).mean()
    (found,) = torch.autograd.grad(surrogate, logits)
    assert torch.allclose(found, (1 / k - 1 / n) * expected, rtol=1e-9, atol=0)


def test_advantages_of_correct_and_incorrect_are_the_papers() -> None:
    found = normalized(best_of(torch.tensor([1.0, 0, 0, 0, 0, 1, 0, 0]), 8, 3), 8, "none")
    mean = 1 - (6 * 5 * 4) / (8 * 7 * 6)  # 2508.10751: 1 - C(incorrect, k) / C(n, k)
    assert found[0].item() == pytest.approx(1 - mean, abs=1e-6)
    assert found[1].item() == pytest.approx(1 - mean - (5 * 4) / (7 * 6), abs=1e-6)


def test_a_k_that_groups_cannot_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rollout\.pass_at_k=4: from 2 to train\.num_generations=4 less 1"):
        ours(tmp_path, rollout=Rollout(pass_at_k=4))
