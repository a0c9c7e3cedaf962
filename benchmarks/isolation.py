"""Cost of a process for a reward: milliseconds per completion with and without it.

`python -m benchmarks.isolation` takes a few seconds and writes `benchmarks/isolation.json`.
"""

import importlib
import json
import os
import time
from collections.abc import Callable
from datetime import date
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.demo import ROOT
from rewards.check import fn_and_kwargs
from rewards.isolation.reward import Reward

REWARDS = ["correctness", "format", "xml_format", "brevity", "repetition", "overlong"]
COMPLETIONS, TOKENS, TIMES = 64, 786, 20


def fastest(call: Callable[[], Any]) -> float:
    """Return the milliseconds per completion of the fastest of `TIMES` calls."""
    seconds = []
    for _ in range(TIMES):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return 1000 * min(seconds) / COMPLETIONS


def main() -> None:
    """Measure, print and write."""
    columns = {
        "prompts": [f"{row}. " + "How many are there? " * 30 for row in range(COMPLETIONS)],
        "completions": [f"{row}. " + "Let us see, one after the other. " * 90 + "#### 5" for row in range(COMPLETIONS)],
        "completion_ids": [list(range(row, row + TOKENS)) for row in range(COMPLETIONS)],
        "answer": ["5"] * COMPLETIONS,
    }
    table = Table("reward", "alone, ms", "in a process, ms", "isolation, ms")
    results = {}
    for name in REWARDS:
        fn, kwargs = fn_and_kwargs(name, [])
        function = getattr(importlib.import_module(f"rewards.{name}"), name)
        reward = Reward(fn, name, kwargs)
        alone = fastest(lambda: function(**columns, **kwargs))  # noqa: B023
        isolated = fastest(lambda: reward.score(**columns))  # noqa: B023
        reward.close()
        results[name] = {"alone_ms": round(alone, 4), "isolated_ms": round(isolated, 4)}
        table.add_row(name, f"{alone:.3f}", f"{isolated:.3f}", f"{isolated - alone:.3f}")
    Console().print(table)
    result = {
        "date": str(date.today()),
        "cpu_cores": os.cpu_count(),
        "rows": COMPLETIONS,
        "tokens": TOKENS,
        "rewards": results,
    }
    (ROOT / "benchmarks" / "isolation.json").write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
