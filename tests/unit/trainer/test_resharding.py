"""The state of two processes as that of another number of them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo.trainer.batch import Batch
from grpo.trainer.resume import dealt, resharded
from tests.stock_trl import ours

COUNTED = {"old_per_token_logps": 0, "importance_sampling_ratio": 1, "tool_mask": 1}
"""Values of padding."""


def slice_of(number: int, prompt: int, completion: int) -> Batch:
    """A slice of one row of these lengths, whose numbers are all `number`."""
    filled = {"prompt_ids": prompt, "prompt_mask": prompt, "completion_ids": completion, "completion_mask": completion}
    filled |= dict.fromkeys(COUNTED, completion) | {"token_type_ids": prompt + completion}
    return {name: torch.full((1, length), number) for name, length in filled.items()} | {
        "advantages": torch.full((1,), float(number)),
        "num_items_in_batch": torch.tensor(7),
    }


def state_of(rank: int, **changes: Any) -> dict[str, Any]:
    """A state in the middle of a generation of two slices for each process, as `Resume.state_dict` returns it."""
    in_flight = {"finished": [rank] * (rank == 0), "again": [[rank]] * (rank == 0), "pending": (2, 5)}
    return {
        "rollouts": {"completions_at_once": (16, 8)[rank], "order": {"taken": 9}, "in_flight": in_flight},
        "step_update": {"budget": {"tokens": (500, 400)[rank]}},
        "step": 3,
        "buffer": [slice_of(10 * step + rank, 3 + rank, 4 - rank) for step in range(2)],
        "unlogged": ((1.0, 3.0)[rank], 6),
        "metrics": {"reward": [0.5]},
    } | changes


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_each_step_has_the_slices_that_it_would_have_had(processes: int) -> None:
    buffers = [state_of(rank)["buffer"] for rank in range(2)]
    found = [dealt(buffers, rank, processes) for rank in range(processes)]
    in_order = [int(part["advantages"]) for parts in zip(*found, strict=True) for part in parts]
    assert in_order == [0, 1, 10, 11]
    for part in (part for parts in found for part in parts):
        number = int(part["advantages"])
        own, other = (3, 4) if number % 10 == 0 else (4, 3)
        assert part["prompt_mask"].tolist() == [[0] * (4 - own) + [number] * own]
        assert part["completion_mask"].tolist() == [[number] * other + [0] * (4 - other)]
        assert part["token_type_ids"].tolist() == [[0] * (4 - own) + [number] * 7 + [0] * (4 - other)]
        for name, padding in COUNTED.items():
            assert part[name].tolist() == [[number] * other + [padding] * (4 - other)], name
        assert part["num_items_in_batch"] == 7


@pytest.mark.parametrize("rank", [0, 3])
def test_what_depends_on_the_process_is_that_of_all(rank: int) -> None:
    found = resharded([state_of(0), state_of(1)], rank, 4)
    assert found["rollouts"]["completions_at_once"] == 8, "the lowest limit"
    assert found["step_update"] == {"budget": {"tokens": 400}}
    assert found["unlogged"] == (2.0, 6), "a mean, of which the log makes a mean again"
    assert found["step"] == 1, "of half as many slices"
    assert found["metrics"] == {"reward": [0.5]}
    in_flight = found["rollouts"]["in_flight"]
    assert in_flight["pending"] == (2, 5)
    assert (in_flight["finished"], in_flight["again"]) == (([0], [[0]]) if rank == 0 else ([], []))


def test_a_generation_begins_where_none_is_in_use() -> None:
    states = [state_of(rank, buffer=None, step=12) for rank in range(2)]
    for processes in (1, 3):
        found = resharded(states, 0, processes)
        assert (found["step"], found["buffer"]) == (0, None)


def test_a_loss_of_each_slice_keeps_its_processes(tmp_path: Path) -> None:
    trainer = ours(tmp_path / "run", loss_type="bnpo")
    for rank in range(2):
        torch.save({}, tmp_path / f"grpo_state_{rank}.pt")
    with pytest.raises(ValueError, match="this loss depends on the number of processes: 2 before, 1 now"):
        trainer.resume.load(trainer, tmp_path, torch.device("cpu"))


def test_a_loss_of_routers_keeps_its_processes(tmp_path: Path) -> None:
    trainer = ours(tmp_path / "run", loss_type="dapo")
    trainer.step_update.traits = replace(trainer.step_update.traits, router=True)
    for rank in range(2):
        torch.save({}, tmp_path / f"grpo_state_{rank}.pt")
    with pytest.raises(ValueError, match="this loss depends on the number of processes: 2 before, 1 now"):
        trainer.resume.load(trainer, tmp_path, torch.device("cpu"))
