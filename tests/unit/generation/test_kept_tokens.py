"""What an engine tells of the tokens that a sampling filter has kept."""

import pickle
from types import SimpleNamespace

import pytest

from grpo.generation.kept_tokens import WIDEST, as_tensor, most_kept, with_kept, with_masks
from grpo.utils.errors import GenerationError

FILTERED = float("-inf")


@pytest.mark.parametrize(("top_k", "asked"), [(None, 0), (0, 0), (-1, 0), (4, 8), (60, 100), (100, 100)])
def test_as_many_again_are_asked_for_as_may_equal_the_last(top_k: int | None, asked: int) -> None:
    assert most_kept(top_k, 100) == asked


@pytest.mark.parametrize("filtered", [FILTERED, -9999.0, None], ids=["engine", "server", "not a number"])
def test_a_log_probability_knows_the_tokens_that_were_kept(filtered: float | None) -> None:
    logprobs = [[[-0.2, -1.7, filtered], [-0.1, filtered, filtered]], [[-1.1, -1.1, -1.1]]]
    ids = [[[7, 3, 9], [4, 0, 1]], [[5, 6, 7]]]
    found = with_kept([[3, 4], [6]], logprobs, ids, asked=4, vocabulary=100)
    assert [[value for (value,) in row] for row in found] == [[-1.7, -0.1], [-1.1]]
    assert [[list(value.kept) for (value,) in row] for row in found] == [[[7, 3], [4]], [[5, 6, 7]]]
    assert pickle.loads(pickle.dumps(found))[0][0][0].kept.tolist() == [7, 3]


@pytest.mark.parametrize(("vocabulary", "known"), [(100, False), (3, True)])
def test_nothing_is_known_where_more_may_have_been_kept(vocabulary: int, known: bool) -> None:
    (((value,),),) = with_kept([[3]], [[[-1.0, -1.1, -1.2]]], [[[3, 1, 2]]], asked=3, vocabulary=vocabulary)
    assert (value is not None) == known


def test_a_mask_comes_with_the_log_probability_of_its_draw() -> None:
    """Unless it is so wide that its tokens would fill the memory, or the log-probability is not a number."""
    drawn = [(7, -0.5, [2, 7]), (3, -0.1, range(WIDEST)), (3, -0.1, range(WIDEST + 1)), (5, float("nan"), [5])]
    completion = SimpleNamespace(
        token_ids=[token for token, _, _ in drawn],
        logprobs=[{token: SimpleNamespace(logprob=value)} for token, value, _ in drawn],
        sampling_mask=SimpleNamespace(token_ids=[mask for _, _, mask in drawn]),
    )
    ((known, wide, wider, unknown),), nothing = with_masks([SimpleNamespace(outputs=[completion])])
    assert (known, list(known[0].kept), len(wide[0].kept)) == ([-0.5], [2, 7], WIDEST)
    assert (wider, unknown, nothing) == ([None], [None], None)


def test_kept_tokens_are_padded() -> None:
    (first,) = with_kept([[3, 4]], [[[-0.2, -1.7], [-0.1, FILTERED]]], [[[7, 3], [4, 0]]], asked=4, vocabulary=9)
    rows = [[value for (value,) in first], [None], [*first[1], 0.0]]  # the last of a tool
    assert as_tensor(rows).tolist() == [[[7, 3], [4, -1]], [[-1, -1], [-1, -1]], [[4, -1], [-1, -1]]]
    assert as_tensor([[None], [None]]).tolist() == [[[-1]], [[-1]]]


def test_an_engine_that_tells_nothing_is_an_error() -> None:
    with pytest.raises(GenerationError, match="does not tell which tokens"):
        as_tensor([[-1.0, -2.0], [0.0]])
