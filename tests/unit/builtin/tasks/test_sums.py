from hypothesis import given
from hypothesis import strategies as st

from grpo.builtin.tasks.sums import rows


@given(st.integers(0, 1000))
def test_sums_are_correct_and_their_carries_counted(seed: int) -> None:
    for row in rows("train", 20, seed):
        a, b = map(int, str(row["question"]).split(" + "))
        assert row["answer"] == str(a + b)
        assert row["carried"] == sum(((a % 10 + b % 10) > 9, a + b > 99))


def test_no_held_out_sum_is_trained_on_in_either_order() -> None:
    def pairs(split: str) -> set[frozenset[str]]:
        return {frozenset(str(row["question"]).split(" + ")) for row in rows(split, 3000, 0)}

    assert not pairs("train") & pairs("test")
    assert frozenset(["59", "63"]) not in pairs("test")  # the example in the prompt
