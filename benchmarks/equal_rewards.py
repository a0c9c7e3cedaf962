"""Groups with equal rewards: how many of their completions the update skips, by TRL's advantages and by ours.

`python -m benchmarks.equal_rewards` takes half a minute and writes `benchmarks/equal_rewards.json`. Three rewards with
weights of 1, 0.3 and 0.1 give tenths and thirds, as rewards for correctness, format and brevity do, and are all equal
within half of the groups. Stock TRL's advantages of such a group are zero only where the mean happens to be exact.
"""

import json
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from trl import GRPOTrainer

from grpo.config.schema import ROOT
from grpo.rundir.versions import versions
from grpo.trainer import ExactGRPOTrainer
from tests.stock_trl import make, train

STEPS = 20
GROUP = 8
WEIGHTS = [1.0, 0.3, 0.1]


def level(prompt: str, ids: list[int], levels: int) -> int:
    """Return a level from 0 to `levels` that is equal within the groups of every second prompt."""
    return (sum(map(ord, prompt)) if sum(map(ord, prompt)) % 2 else sum(ids)) % (levels + 1)


def correctness(prompts: list[str], completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Return thirds."""
    return [level(prompt, ids, 3) / 3 for prompt, ids in zip(prompts, completion_ids, strict=True)]


def form(prompts: list[str], completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Return tenths."""
    return [level(prompt, ids, 10) / 10 for prompt, ids in zip(prompts, completion_ids, strict=True)]


def brevity(prompts: list[str], completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Return tenths that fall with the level."""
    return [1 - level(prompt, ids, 7) / 10 for prompt, ids in zip(prompts, completion_ids, strict=True)]


def advantages(kind: type[GRPOTrainer]) -> list[list[float]]:
    """Return the advantages of each group of all steps."""
    found: list[list[float]] = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = make(
            kind,
            Path(folder),
            reward_funcs=[correctness, form, brevity],
            reward_weights=WEIGHTS,
            num_generations=GROUP,
            per_device_train_batch_size=64,
            max_steps=1,
            seed=0,
        )
        for seed in range(STEPS):
            trainer.generations = seed
            trainer._step = trainer.state.global_step = 0
            train(trainer)
            logged = list(trainer._logs["advantages"])
            found += [logged[start : start + GROUP] for start in range(0, len(logged), GROUP)]
    return found


def main() -> None:
    """Measure, print and write."""
    theirs, ours = advantages(GRPOTrainer), advantages(ExactGRPOTrainer)
    pairs = list(zip(theirs, ours, strict=True))
    noise = [stock for stock, mine in pairs if any(stock) and not any(mine)]
    equal = [mine for _, mine in pairs if not any(mine)]
    result = {
        "groups": len(ours),
        "with_equal_rewards": len(equal) / len(ours),
        "skipped_by_trls_advantages": sum(not any(group) for group in theirs) / len(theirs),
        "skipped_by_ours": len(equal) / len(ours),
        "computed_for_noise": len(noise) / max(1, len(equal)),
        "largest_noise": max((max(map(abs, group)) for group in noise), default=0.0),
    }
    table = Table("", "value")
    for name, value in result.items():
        table.add_row(name, f"{value:.3g}")
    Console().print(table)
    content = {"date": str(date.today()), "versions": versions(), **result}
    (ROOT / "benchmarks" / "equal_rewards.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
