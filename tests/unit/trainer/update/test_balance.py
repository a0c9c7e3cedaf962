"""Micro-batches dealt out over processes."""

from hypothesis import given
from hypothesis import strategies as st

from grpo.trainer.update.balance import deal, duration, limits

COSTS = st.lists(st.floats(0.1, 100), min_size=0, max_size=40)


@given(COSTS, st.integers(1, 8), st.booleans())
def test_each_microbatch_is_dealt_once(costs: list[float], processes: int, in_rounds: bool) -> None:
    dealt = deal(costs, processes, in_rounds)
    assert len(dealt) == processes
    assert sorted(index for own in dealt for index in own) == list(range(len(costs)))


@given(COSTS, st.integers(1, 8))
def test_no_process_ends_much_later_than_the_mean(costs: list[float], processes: int) -> None:
    last = duration(costs, deal(costs, processes, in_rounds=False), in_rounds=False)
    # Graham's bound for any list: the last one to end was the least loaded before its last micro-batch
    assert last <= sum(costs) / processes + (1 - 1 / processes) * max([*costs, 0]) + 1e-9


def test_a_long_microbatch_is_not_added_to_others() -> None:
    assert sorted(map(sorted, deal([10, 1, 2, 3, 4], 2, in_rounds=False))) == [[0], [1, 2, 3, 4]]


def test_microbatches_of_one_round_cost_about_as_much() -> None:
    costs = [9.0, 1.0, 8.0, 2.0, 5.0, 4.0]
    dealt = deal(costs, 2, in_rounds=True)
    assert [{costs[own[turn]] for own in dealt} for turn in range(3)] == [{9.0, 8.0}, {5.0, 4.0}, {2.0, 1.0}]
    assert duration(costs, dealt, in_rounds=True) == 9 + 5 + 2
    assert duration(costs, deal(costs, 2, in_rounds=False), in_rounds=False) == 15


def test_a_process_gets_a_microbatch_even_if_one_could_hold_all() -> None:
    assert limits(tokens=100, processes=2, budget=1000) == [1000, 50, 25, 17, 13]
    assert limits(tokens=10_000, processes=2, budget=1000) == [1000]
    assert limits(tokens=0, processes=2, budget=1000) == [1000]
