"""What processes agree on, where the store between them is gone."""

import pytest

from grpo import distributed


@pytest.mark.parametrize(("rank", "speaks"), [("0", True), ("1", False)])
def test_where_nobody_can_say_who_failed_first_only_the_first_process_speaks(
    monkeypatch: pytest.MonkeyPatch, rank: str, speaks: bool
) -> None:
    def gone() -> None:
        raise ConnectionError("the process that kept the store has ended")

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(distributed, "store", gone)
    assert distributed.is_first_to_fail("a reason") == speaks
    assert distributed.first_failure() is None
