"""What processes agree on, where the store between them is gone; and which of them failed first."""

import signal

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from grpo import distributed, outcome
from grpo.errors import RunError
from grpo.launching.elastic import first_cause


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


@pytest.mark.parametrize(
    ("codes", "rank"),
    [([1, -signal.SIGKILL], 1), ([-signal.SIGTERM, 1], 1), ([1, -signal.SIGTERM], 0), ([-signal.SIGSEGV, 1], 0)],
    ids=["killed", "stopped by the launcher", "the other way round", "crashed"],
)
def test_the_process_that_the_others_follow_is_named(codes: list[int], rank: int) -> None:
    failures = {
        rank: ProcessFailure(local_rank=rank, pid=rank, exitcode=code, error_file="") for rank, code in enumerate(codes)
    }
    assert first_cause(ChildFailedError("grpo.train", failures))[0] == rank


def test_a_process_that_is_stopped_for_another_has_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    summary: dict[str, str] = {"status": "running"}
    outcome.give_way(summary)
    assert summary == {"status": "running"}, "nobody has failed"
    monkeypatch.setattr(outcome, "first_failure", lambda: "failed: the reward is asleep")
    with pytest.raises(RunError, match="failed: the reward is asleep"):
        outcome.give_way(summary)
    assert summary == {"status": "failed", "reason": "the reward is asleep"}
