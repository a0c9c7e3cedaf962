"""Rows saved by two processes and continued by another number of them: `none` and `fsdp2` as few as have all values.

`torchrun --nproc-per-node=2 -m tests.combinations.at_another_size FOLDER SHARD` trains and saves; started again with
another number of processes, it continues from the checkpoints, and compares. With `all` as SHARD it takes all rows.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils.constants import OPTIMIZER_NAME
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from grpo.config.batch import SLICES
from grpo.trainer.rollout.dynamic_sampling import DynamicSampling
from tests.combinations.array import Row, drawn, few, name, rows
from tests.combinations.comparisons import RATE, in_float64, norm
from tests.combinations.features import FEATURES
from tests.combinations.trainings import ours, saved
from tests.e2e.sharded import Weights, shard_options
from tests.sharding_on_cpus import enable

Tensors = dict[str, torch.Tensor]
SAVED_BY = 2
"""Processes."""


def possible(row: Row, shard: str) -> Row:
    """The row without what is refused: see `grpo.config.nodes`."""
    row = row | {"entropy": "none", "loss": "dapo" if row["loss"] == "bnpo" else row["loss"]}
    if (row["steps"] != "a slice" and row["steps"] != "four slices") or row["iterations"] == "2":
        row |= {"policy": "full attention"} if row["policy"].startswith("images") else {}
        row |= {"weights": "all"} if row["weights"] == "frozen tower" else {}
    if shard == "fsdp2":
        row |= {"layers": "as they are"} | ({"penalty": "KL"} if row["penalty"] == "KL, moving reference" else {})
    return row


def possible_rows(shard: str) -> list[Row]:
    """All rows, or drawn ones of few, with plain values in the place of what is refused."""
    found = [possible(row, shard) for row in rows()]
    return found if shard == "all" else drawn(few(found))


def batch_of(row: Row, processes: int) -> dict[str, int]:
    """The same batch for 1, 2 and 4 processes, in slices that are a quarter as large."""
    usual = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1} | FEATURES["steps"][row["steps"]]
    slices = {key: 4 * usual[key] * SAVED_BY // processes for key in SLICES if key in usual}
    return {"per_device_train_batch_size": usual["per_device_train_batch_size"] // 4, **slices}


class Loaded(Weights):
    """The weights before a training and after its first step, and whether FSDP2 has loaded AdamW's moments as saved."""

    def on_step_end(self, args: Any, state: Any, *others: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            self.first = self.now()

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        super().on_train_begin()
        checkpoint, sharded = self.trainer.args.resume_from_checkpoint, self.trainer.is_fsdp_enabled
        if checkpoint and sharded:
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            moments = get_optimizer_state_dict(self.trainer.model, self.trainer.optimizer, options=options)
            if self.before:
                expected = torch.load(Path(checkpoint) / f"{OPTIMIZER_NAME}.bin")["state"]
                assert any(moment["exp_avg"].any() for moment in expected.values())
                torch.testing.assert_close(moments["state"], expected, rtol=0, atol=0)


def trained(row: Row, folder: Path, shard: str, processes: int) -> tuple[Tensors, Tensors]:
    """The weights that a training was begun with and those at its end, on the first process.

    It saves after its first step, and then returns the weights of then, or continues from there.
    """
    options = {**RATE, **batch_of(row, processes)}
    if row["policy"] == "experts":  # the loss of its routers keeps the processes
        options["router_aux_loss_coef"] = 0.0
    checkpoint = str(folder / "checkpoint-1") if processes != SAVED_BY else None
    options |= {"resume_from_checkpoint": checkpoint} if checkpoint else {"save_strategy": "steps", "save_steps": 1}
    if shard == "fsdp2":
        trainer = ours(row, folder, **shard_options(shard) | options)
    else:
        trainer = in_float64(ours(row, folder, **options), row)
    if isinstance(source := trainer.rollouts.source, DynamicSampling):
        source.processes = 4  # rounds of as many problems, which are otherwise a multiple of the processes
    weights = Loaded(trainer)
    trainer.add_callback(weights)
    trainer.train(resume_from_checkpoint=checkpoint)
    return weights.before if checkpoint else weights.first, weights.now()


def check(row: Row, folder: Path, shard: str, processes: int) -> None:
    """Train and save with `SAVED_BY` processes; with others continue from there and compare the change of weights."""
    begun, ended = trained(row, folder, shard, processes)
    if processes == SAVED_BY:
        if ended:
            torch.save([begun, ended], folder / "weights.pt")
    elif ended:
        first, after = torch.load(folder / "weights.pt")
        change = norm({key: after[key] - first[key] for key in after})
        assert change > 1e-5, "nothing was trained"
        assert norm({key: begun[key] - first[key] for key in after}) == 0, "begun elsewhere"
        if row["engine"] == "a server, two steps ahead":
            return  # the first of its batches to finish is the next
        difference = norm({key: ended[key] - after[key] for key in after}) / change
        in_float32 = shard == "fsdp2" or row["weights"] == "QLoRA"  # whose rounding AdamW multiplies
        assert difference <= (1e-5 if in_float32 else 1e-6), difference


def main(folder: Path, shard: str) -> None:
    """Check each row. A process that fails ends the others, which would wait for it."""
    if shard == "fsdp2":
        enable()
    for policy in FEATURES["policy"]:
        saved(policy)
    state = PartialState(cpu=True)
    for place, row in enumerate(possible_rows(shard)):
        state.wait_for_everyone()
        try:
            check(row, folder / str(place), shard, state.num_processes)
        except Exception as error:
            raise AssertionError(f"{place}: {name(row)}") from error


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
