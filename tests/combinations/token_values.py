"""The values per token that our trainer writes, against those of stock TRL."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from pyarrow import parquet

from grpo.trainer.update.token_values import texts
from tests.combinations.array import Row

Values = dict[str, list[float]]
Seen = dict[tuple[int, tuple[str, ...]], list[Values]]
"""By step and tokens of a completion; some completions are equal."""


def note_values(trainer: Any) -> list[tuple[int, tuple[int, ...], Values]]:
    """Return a list to which stock TRL adds step, tokens and values of each completion in its loss."""
    seen: list[tuple[int, tuple[int, ...], Values]] = []
    scored: list[Any] = []
    score, compute = trainer._get_per_token_logps_and_entropies, trainer._compute_loss

    def noting(*args: Any, **options: Any) -> Any:
        found = score(*args, **options)
        scored[:] = found[:2]
        return found

    def computed(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        loss = compute(model, inputs)
        if not torch.is_grad_enabled():
            return loss
        logps, entropies = (None if one is None else one.detach() for one in scored)
        old = inputs.get("old_per_token_logps")
        log_ratio = torch.zeros_like(logps) if old is None else logps - old
        if trainer.importance_sampling_level == "sequence":
            mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
            log_ratio = ((log_ratio * mask).sum(1) / mask.sum(1).clamp(min=1))[:, None].expand_as(logps)
        values = {"logp": logps, "ratio": log_ratio.exp(), "advantage": inputs["advantages"][:, None].expand_as(logps)}
        if entropies is not None:
            values["entropy"] = entropies
        if "importance_sampling_ratio" in inputs:
            values["correction"] = inputs["importance_sampling_ratio"].expand_as(logps)
        for row, length in enumerate(inputs["completion_mask"].sum(1).tolist()):
            ids = tuple(inputs["completion_ids"][row, :length].tolist())
            of_row = {name: value[row, :length].tolist() for name, value in values.items()}
            seen.append((trainer.state.global_step + 1, ids, of_row))
        return loss

    trainer._get_per_token_logps_and_entropies, trainer._compute_loss = noting, computed
    return seen


def compare_values(folder: Path, trainer: Any, seen: list[tuple[int, tuple[int, ...], Values]], row: Row) -> None:
    """Compare each value in the files of a run with what stock TRL has seen of an equal completion."""
    everyones: Seen = defaultdict(list)
    for step, ids, values in gather_object(seen):
        everyones[step, tuple(texts(trainer._tokenizer, list(ids)))].append(values)
    if not trainer.accelerator.is_main_process:
        return
    files = sorted((folder / "completions").glob("tokens_*.parquet"))
    assert files
    tolerance = 2e-2 if row["weights"] == "QLoRA" else 1e-4  # whose steps do not begin with the same weights
    own = row["loss"] in ("dppo", "maxrl")  # with ratios and advantages of their derivations
    for file in files:
        step = int(file.stem.removeprefix("tokens_"))
        for found in parquet.read_table(file).to_pylist():
            names = {"logp", "entropy"} if own else {"logp", "entropy", "ratio", "advantage", "correction"}
            candidates = everyones[step, tuple(found["token"])]
            assert candidates, f"step {step}: TRL has not seen {found['token']}"
            differences = [difference(found, values, names & values.keys()) for values in candidates]
            assert min(differences) <= tolerance, f"step {step}: {differences}"


def difference(found: dict[str, Any], values: Values, names: set[str]) -> float:
    """The largest, in nats or relative to the value."""
    pairs = (pair for name in names for pair in zip(found[name], values[name], strict=True))
    return max(abs(mine - other) / max(1, abs(other)) for mine, other in pairs)
