"""A changed reward, compared on the completions of a run."""

from collections.abc import Callable
from pathlib import Path

import pyarrow
from pyarrow.parquet import read_table
from rich.console import Console

from rewards.checking import print_table
from rewards.isolation.reward import Reward
from rewards.probing.trial import score, token_ids
from rewards.text import text_of

SHOWN = 10
"""Completions that are shown."""
TOLERANCE = 0.01
"""Differences of rewards up to this are none: runs keep single precision, and not the token that ends a completion."""


def compare_with_run(folder: Path, reward: Reward, console: Console) -> None:
    """Score the completions that TRL has written in a run directory and show those that get another reward now.

    Raises:
        ValueError: the run has kept no completions, or has no such reward, or the reward compares completions.
    """
    files = sorted((folder / "completions").glob("completions_*.parquet"))
    if not files:
        raise ValueError(
            f"{folder}: no completions in it (completions/completions_*.parquet, kept by train.log_completions=true)"
        )
    table = pyarrow.concat_tables(map(read_table, files), promote_options="permissive")
    rows, names = table.to_pylist(), table.column_names
    if reward.name not in names:
        raise ValueError(f"{folder}: the run has no reward {reward.name}; choose one with --name: {', '.join(names)}")
    if reward.compares:
        raise ValueError(f"{reward.name} compares the completions of a group, and the run has kept no groups")
    if missing := reward.missing(names):
        raise ValueError(f"{reward.name} needs a column {missing[0]}; the run has kept: {', '.join(names)}")
    before = [None if value is None or value != value else float(value) for value in table[reward.name].to_pylist()]
    completions = [row.pop("completion") for row in rows]
    after = score(reward, rows, completions, tokenizer_of(folder))
    changed = [row for row, (old, new) in enumerate(zip(before, after, strict=True)) if differ(old, new)]
    console.print(f"{len(changed)} of {len(rows)} completions get another reward")
    if changed:
        ends = {row: " ".join(text_of(completions[row])[-200:].split()) for row in changed[:SHOWN]}
        shown = [[str(rows[row]["step"]), end, str(before[row]), str(after[row])] for row, end in ends.items()]
        print_table(console, ["step", "completion"], [reward.name, "now"], shown)
    if len(changed) > SHOWN:
        console.print(f"and {len(changed) - SHOWN} more")


def differ(old: float | None, new: float | None) -> bool:
    """Whether two rewards differ by more than the tolerance."""
    return old is not new and (old is None or new is None or abs(old - new) > TOLERANCE)


def tokenizer_of(folder: Path) -> Callable[[str], list[int]]:
    """Return the run's tokenizer as a function from text to tokens; a substitute if the run has no tokenizer."""
    if not (folder / "model" / "tokenizer_config.json").is_file():
        return token_ids
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
