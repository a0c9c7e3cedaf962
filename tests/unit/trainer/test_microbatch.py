"""Which rows go into which micro-batch."""

import itertools
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from grpo.trainer.microbatch import cost, has_work, least_cost, loss_fractions, pack
from grpo.utils.oom import half

ROWS = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 80)), min_size=1, max_size=40)
BUDGET = st.integers(1, 600)


@given(ROWS, BUDGET, st.data())
def test_every_row_with_work_appears_once(pairs: list[tuple[int, int]], budget: int, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.sampled_from(range(len(pairs))), unique=True))
    parts = pack(*zip(*pairs, strict=True), budget, rows)
    assert sorted(row for part in parts for row in part.rows) == sorted(rows)


@given(ROWS, BUDGET)
def test_no_microbatch_exceeds_the_budget_unless_it_is_one_row(pairs: list[tuple[int, int]], budget: int) -> None:
    for part in pack(*zip(*pairs, strict=True), budget):
        assert part.tokens <= budget or len(part.rows) == 1
        assert part.tokens == len(part.rows) * (part.prompt_length + part.completion_length)


@given(ROWS, BUDGET)
def test_a_microbatch_is_trimmed_to_its_own_longest_completion(pairs: list[tuple[int, int]], budget: int) -> None:
    for part in pack(*zip(*pairs, strict=True), budget):
        assert part.prompt_length == max(pairs[row][0] for row in part.rows)
        assert part.completion_length == max(pairs[row][1] for row in part.rows)


@given(ROWS, BUDGET, st.data())
def test_weights_add_up_to_the_share_of_the_rows_with_work(
    pairs: list[tuple[int, int]], budget: int, data: st.DataObject
) -> None:
    counts = data.draw(st.lists(st.integers(0, 80), min_size=len(pairs), max_size=len(pairs)))
    share = loss_fractions(counts)
    rows = [row for row, work in enumerate(has_work(counts, None)) if work]
    parts = pack(*zip(*pairs, strict=True), budget, rows, share)
    assert sum(part.weight for part in parts) == pytest.approx(1.0 if any(counts) else 0.0)
    assert all(part.weight == 1.0 for part in pack(*zip(*pairs, strict=True), budget, rows))


@given(st.integers(1, 60), st.integers(1, 50), st.integers(1, 80), BUDGET)
def test_equal_rows_stay_in_order(count: int, prompt: int, completion: int, budget: int) -> None:
    parts = pack([prompt] * count, [completion] * count, budget)
    largest = max(1, budget // (prompt + completion))
    assert all(list(part.rows) == sorted(part.rows) for part in parts)
    assert len(parts) == math.ceil(count / largest)
    by_place = sorted(parts, key=lambda part: part.rows)
    assert list(itertools.chain(*(part.rows for part in by_place))) == list(range(count))


@given(ROWS, BUDGET)
def test_the_largest_microbatch_comes_first(pairs: list[tuple[int, int]], budget: int) -> None:
    sizes = [part.tokens for part in pack(*zip(*pairs, strict=True), budget)]
    assert sizes == sorted(sizes, reverse=True)


@given(ROWS, BUDGET, st.integers(0, 64))
def test_no_division_costs_less_than_the_least_cost(
    pairs: list[tuple[int, int]], budget: int, hidden_size: int
) -> None:
    """Below it, shared prompts are chosen without a look at other divisions."""
    parts = pack(*zip(*pairs, strict=True), budget, hidden_size=hidden_size)
    filled = [(prompt, max(1, completion)) for prompt, completion in pairs]
    assert least_cost(filled, budget, hidden_size) <= cost(parts, budget, hidden_size) + 1e-6


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 30)), min_size=1, max_size=7), st.integers(30, 300))
@example([(1, 1), (1, 30), (20, 1), (20, 30)], 150)
def test_no_cut_of_the_sorted_rows_costs_less(pairs: list[tuple[int, int]], budget: int) -> None:
    """Against all ways to cut the rows sorted by completion, counted one by one."""
    order = sorted(pairs, key=lambda pair: (pair[1], pair[0]))
    least = math.inf
    for cuts in itertools.product([False, True], repeat=len(order) - 1):
        groups: list[list[tuple[int, int]]] = [[order[0]]]
        for pair, cut in zip(order[1:], cuts, strict=True):
            if cut:
                groups.append([pair])
            else:
                groups[-1].append(pair)
        sizes = [len(group) * (max(p for p, _ in group) + max(c for _, c in group)) for group in groups]
        if all(size <= budget or len(group) == 1 for size, group in zip(sizes, groups, strict=True)):
            least = min(least, sum(sizes) + len(sizes) * budget / 16)
    assert cost(pack(*zip(*pairs, strict=True), budget), budget) <= least + 1e-6


def test_an_odd_row_that_alone_exceeds_the_budget_goes_alone() -> None:
    parts = pack([10, 10, 10], [10, 500, 12], budget=100)
    assert [part.rows for part in parts] == [(1,), (0, 2)]


def test_completions_of_unequal_length_are_not_padded_to_one() -> None:
    parts = pack([10] * 64, [256] * 4 + [20] * 60, budget=4096)
    assert sum(part.tokens for part in parts) == 4 * 266 + 60 * 30


def test_no_rows_make_no_microbatch() -> None:
    assert pack([5, 5], [5, 5], 100, rows=[]) == []


def test_a_row_has_work_if_a_token_counts_and_something_acts() -> None:
    assert has_work([3, 0, 3, 3], [1.0, 1.0, 0.0, -1e-9]) == [True, False, False, True]
    assert has_work([3, 0, 3, 3], None) == [True, False, True, True]


@given(st.lists(st.integers(0, 100), min_size=1))
def test_shares_are_a_row_s_part_of_the_average(counts: list[int]) -> None:
    assert sum(loss_fractions(counts)) == pytest.approx(1.0 if any(counts) else 0.0)


@given(st.integers(2, 200), st.integers(1, 16))
def test_halves_keep_groups_whole_while_there_are_several(rows: int, group: int) -> None:
    middle = half(rows, group)
    assert 0 < middle < rows
    if rows >= 2 * group:
        assert middle % group == 0
        assert abs(rows - 2 * middle) < 2 * group
