"""Two trainings of a row of features, by ours and by stock TRL, and whether they are the same."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from grpo.trainer import compiled_layers
from grpo.utils.patching import replaced
from tests.combinations.array import Row
from tests.combinations.token_values import compare_values, note_values
from tests.combinations.trainings import STEPS, ours, stock
from tests.e2e.sharded import Weights, change, shard_options
from tests.stock_trl import Record, doubled, note_kept, relative_difference, train

RATE = {"learning_rate": 1e-3}
"""At a higher one some policies run so far away that terms cancel and little but rounding is left of them."""


def in_float64(trainer: Any, row: Row) -> Any:
    """Let a trainer compute in float64, so that what is compared is not rounding; a quantized policy cannot."""
    if row["weights"] != "QLoRA":
        doubled(trainer)
    return trainer


class References(TrainerCallback):
    """The weights of a moving reference before each step, which follow from those of the policy after steps."""

    def __init__(self, trainer: Any, start_from: Sequence[dict[str, torch.Tensor]] = ()) -> None:
        """Record; begin each step with these weights."""
        self.model = trainer.ref_model if trainer.args.sync_ref_model else None
        self.start_from = start_from
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        if self.model is not None:
            if self.start_from:
                self.model.load_state_dict(self.start_from[len(self.weights)])
            self.weights.append({name: weight.clone() for name, weight in self.model.state_dict().items()})


def trained(row: Row, folder: Path) -> tuple[Record, Record, Any]:
    """What our trainer computes with the features of a row, and what stock TRL does; and our trainer."""
    saving = {"save_strategy": "steps", "save_steps": 1} if row["resume"] == "yes" else {}
    mine = in_float64(ours(row, folder / "ours", **RATE, **saving), row)
    kept = note_kept(mine)
    references = References(mine)
    mine.add_callback(references)
    record = train(mine)
    theirs = in_float64(stock(row, folder, mine, kept, **RATE), row)
    theirs.add_callback(References(theirs, references.weights))
    seen = note_values(theirs)
    expected = train(theirs, record.weights)
    compare_values(folder / "ours", mine, seen, row)
    return record, expected, mine


def check_sharded(row: Row, folder: Path, shard: str) -> None:
    """Train with a sharded policy, as we do and as TRL does, and compare how the weights change in all steps.

    Args:
        folder: shared by all processes.
        shard: a choice of `conf/shard`.
    """
    resumes = row["resume"] == "yes"
    longer = row["loss"] == "luspo"  # whose gradient grows with the length: the policy would run away, see `RATE`
    # FSDP2 cannot resume without a state; AdamW's division by it, if it were near zero, would multiply rounding
    options = {**shard_options(shard), "adam_epsilon": 1.0, "learning_rate": 0.003 if longer else 0.01}
    saving = {"save_strategy": "steps", "save_steps": 1} if resumes else {}
    mine = ours(row, folder / "ours", **options, **saving)
    kept = note_kept(mine)
    changed, _ = change(mine)
    expected, _ = change(stock(row, folder, mine, kept, **options))
    ended, resumed = Weights(mine).now(), Weights(mine).now()
    if resumes:
        again = ours(row, folder / "resumed", **options)
        again.train(resume_from_checkpoint=str(folder / "ours" / "checkpoint-1"))
        resumed = Weights(again).now()
    if expected:  # on the first process, once nothing is left to do together
        difference = relative_difference(changed, expected)
        assert norm(expected) > 1e-5, "nothing was trained"
        assert difference <= 1e-4, f"after {STEPS} steps: {difference}"
        exact = row["engine"] != "a server, two steps ahead"  # of which the first batch to finish is the next
        assert not exact or relative_difference(resumed, ended) == 0, f"resumed: {relative_difference(resumed, ended)}"


def norm(gradients: dict[str, torch.Tensor]) -> float:
    return sum(float(gradient.double().pow(2).sum()) for gradient in gradients.values()) ** 0.5


def check(row: Row, folder: Path) -> None:
    """Train with the features of a row, as we do and as TRL does, and compare the gradients.

    Args:
        folder: shared by all processes.
    """
    with replaced(compiled_layers, "BACKEND", "aot_eager"):  # traced as for a GPU, without a compiler's seconds
        check_traced(row, folder)


def check_traced(row: Row, folder: Path) -> None:
    """Compare the gradients of a row, and what it resumes to."""
    mine, theirs, trainer = trained(row, folder)
    compare(mine, theirs, 1e-4 if row["weights"] == "QLoRA" else 1e-5)
    if row["resume"] == "yes":
        resumed = in_float64(ours(row, folder / "resumed", **RATE), row)
        resumed.train(resume_from_checkpoint=str(folder / "ours" / "checkpoint-1"))
        assert resumed.state.global_step == STEPS
        if row["engine"] == "a server, two steps ahead":
            return  # the first of its batches to finish is the next
        difference = relative_difference(resumed.model.state_dict(), trainer.model.state_dict())
        assert difference <= (1e-5 if row["weights"] == "QLoRA" else 0)


def compare(mine: Record, theirs: Record, tolerance: float) -> None:
    """Compare the gradients of all steps; their differences may be so large, relative to the gradients."""
    assert len(mine.gradients) == len(theirs.gradients) == STEPS
    # rounding is that of terms that may cancel: of what is left where the policy still is its reference, and of
    # positions that begin elsewhere, as prompts have less padding or are shared; norms are from 0.1 to 10
    scale = max(norm(expected) for expected in theirs.gradients)
    assert scale > 1e-3
    for step, (gradient, expected) in enumerate(zip(mine.gradients, theirs.gradients, strict=True), 1):
        difference = norm({name: gradient[name] - expected[name] for name in gradient})
        relative = difference / max(norm(expected), scale / 2, 0.1)
        assert relative <= tolerance, f"step {step}: {relative}"
