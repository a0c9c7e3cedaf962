"""Write worked solutions of the built-in task for `trl sft`: `python examples/warm_start/solutions.py FOLDER`.

A line of `train.jsonl` is a prompt as the task `arithmetic` has it, and a calculation a line with the answer behind
`####`. No held-out problem is among them.
"""

import json
import sys
from itertools import islice
from pathlib import Path

from grpo.builtin.tasks.arithmetic import Problem, calculate, problems

SOLUTIONS = 256


def solution(problem: Problem) -> str:
    """Return the worked solution of a problem."""
    value, lines = problem.start, []
    for operation, number in problem.steps:
        result = calculate(value, operation, number)
        lines.append(f"{value} {operation} {number} = {result}")
        value = result
    return "\n".join([*lines, f"#### {value}"])


def main() -> None:
    """Write the file."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"prompt": f"{problem.question}\n", "completion": solution(problem)}
        for problem in islice(problems("train", seed=1), SOLUTIONS)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
