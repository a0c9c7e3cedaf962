"""Tokens are drawn by their probabilities, whatever the size of the vocabulary."""

import pytest
import torch

from grpo.generation.transformers.sampling import BLOCK, drawn


@pytest.mark.parametrize("vocabulary", [5, BLOCK, 2 * BLOCK + 17])
def test_tokens_are_drawn_by_their_probabilities(vocabulary: int) -> None:
    torch.manual_seed(0)
    draws = 200_000
    scores = 2 * torch.randn(vocabulary)
    scores[torch.arange(1, vocabulary, 3)] = -torch.inf
    expected = draws * scores.double().softmax(-1)
    tokens = torch.cat([drawn(scores.expand(2000, -1)) for _ in range(draws // 2000)])
    assert tokens.shape == (draws, 1)
    found = tokens[:, 0].bincount(minlength=vocabulary)
    assert found.shape == (vocabulary,)
    assert found[expected == 0].sum() == 0
    often = expected >= 5
    statistic = ((found - expected) ** 2 / expected)[often].sum()
    degrees = int(often.sum())
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5, "chi-squared, by four standard deviations"


def test_each_row_has_its_own_probabilities() -> None:
    tokens = torch.tensor([0, BLOCK - 1, BLOCK, 299, 150])
    scores = torch.full((5, 300), -torch.inf).scatter(1, tokens[:, None], 0.0)
    assert drawn(scores)[:, 0].equal(tokens)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_row_without_probabilities_is_an_error(wrong: float) -> None:
    scores = torch.zeros(3, 200)
    scores[1, 150] = wrong
    with pytest.raises(ValueError, match="NaN or infinite"):
        drawn(scores)
