"""Everything that only a GPU shows, in one command: `python -m benchmarks.gpu [--minutes 10]`.

Experiments run on any single NVIDIA GPU, each in a process of its own, in an order that gives the most knowledge first.
After each, `benchmarks/gpu.json` is written, and at the end `benchmarks/gpu.md`; the same command continues, and
repeats what was cut off.
Nothing is downloaded. `--toy` tries the code without a GPU.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
from hydra import initialize_config_dir
from rich.console import Console
from rich.markdown import Markdown

from benchmarks import gpu_experiments, memory
from benchmarks.gpu_experiments import EXPERIMENTS, NEEDS_VLLM, REAL, TOY
from grpo.config.schema import ROOT, register
from grpo.rundir.files import read_json, write_json
from grpo.rundir.versions import versions
from grpo.utils.hardware import gpus_of_driver, use_expandable_segments
from grpo.utils.limits import GB, USABLE

RESULT = "RESULT "
"""Precedes the line with an experiment's result."""
LONGEST = 300
"""Seconds after which an experiment is ended."""
TOY_CELLS = ("full 0.5B",)


def machine() -> dict[str, Any]:
    """Return what results depend on: GPU, driver and versions."""
    import pynvml

    found: dict[str, Any] = {"device": "cpu", "versions": versions()}
    if gpus := gpus_of_driver():
        found |= {"device": gpus[0].name, "memory_gb": round(gpus[0].total / GB, 1)}
        found |= {"driver": pynvml.nvmlSystemGetDriverVersion(), "cuda": torch.version.cuda}
    return found


def names(toy: bool) -> list[str]:
    """Return the experiments in their order, with the cells of docs/memory.md that fit this GPU."""
    cells: list[str] = list(TOY_CELLS)
    if not toy:
        register()
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            room = USABLE * torch.cuda.get_device_properties(0).total_memory / GB
            planned = memory.plan_cells(None)
        cells = [name for name, plan in planned.items() if plan["planned_gb"] + 1.5 <= room]
    order = list(EXPERIMENTS)
    behind = order.index("vllm asleep") + 1
    return [*order[:behind], *(f"cell {name}" for name in cells), *order[behind:]]


def run_in_process(name: str, toy: bool, seconds: float) -> dict[str, Any]:
    """Run an experiment in a process of its own; return its result, or an `error`."""
    line = [sys.executable, "-m", "benchmarks.gpu", "--experiment", name, *(["--toy"] if toy else [])]
    try:
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {seconds:.0f} s", "cut_off": True}
    results = [text.removeprefix(RESULT) for text in done.stdout.splitlines() if text.startswith(RESULT)]
    return json.loads(results[-1]) if results else {"error": "\n".join(done.stderr.splitlines()[-12:])}


def markdown(content: dict[str, Any], missing: list[str]) -> str:
    """Return the results as one table, a line per number."""
    about = [f"{key}: {value}" for key, value in content.items() if key not in ("results", "versions")]
    about.append("versions: " + ", ".join(f"{name} {number}" for name, number in content["versions"].items()))
    lines = [f"# Measured on {content['device']}", "", "; ".join(about), ""]
    lines += ["| experiment | seconds | number | value |", "|---|---|---|---|"]
    for name, result in content["results"].items():
        for key, value in flat({key: value for key, value in result.items() if key not in ("seconds", "date")}):
            lines.append(f"| {name} | {result['seconds']:.0f} | {key} | {value} |")
    return "\n".join([*lines, "", f"Not done: {', '.join(missing) or 'nothing'}."]) + "\n"


def flat(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield each number of a result with its path, in four digits."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from flat(part, f"{path}, {key}" if path else key)
    elif isinstance(value, list):
        yield path, ", ".join(text for part in value for _, text in flat(part))
    else:
        text = f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).split())
        yield path, text.replace("|", "\\|")


def main() -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--minutes",
        type=float,
        default=10,
        help="stop after this time; default: 10",
    )
    parser.add_argument("--toy", action="store_true", help="tiny shapes, also without a GPU, to try the code")
    parser.add_argument("--output", type=Path, help="JSON file; a .md file is written beside it; default: gpu.json")
    parser.add_argument("--experiment", help=argparse.SUPPRESS)  # for the processes of the experiments
    options = parser.parse_args()
    if options.experiment:
        if options.experiment not in NEEDS_VLLM:  # whose sleep mode refuses them; as in grpo.train
            use_expandable_segments()
        result = gpu_experiments.run(options.experiment, TOY if options.toy else REAL)
        print(RESULT + json.dumps(result), flush=True)
        return
    if not (options.toy or torch.cuda.is_available()):
        sys.exit("benchmarks.gpu: needs an NVIDIA GPU; --toy tries the code without one")
    console, until = Console(), time.monotonic() + 60 * options.minutes
    output = options.output or ROOT / "benchmarks" / ("gpu_toy.json" if options.toy else "gpu.json")
    content = {"toy": options.toy, **machine()}
    known = read_json(output)
    same = all(known.get(key) == value for key, value in content.items())
    content["results"] = {
        name: result for name, result in known.get("results", {}).items() if same and "error" not in result
    }
    order = names(options.toy)
    for name in order:
        left = until - time.monotonic()
        if name not in content["results"] and left > 0:
            started = time.monotonic()
            result = run_in_process(name, options.toy, min(LONGEST, left))
            taken = {"seconds": round(time.monotonic() - started, 1), "date": str(date.today())}
            content["results"][name] = {**result, **taken}
            console.print(f"{name}: {result}", highlight=False, soft_wrap=True, markup=False)
            write_json(output, content)
    missing = [name for name in order if "error" in content["results"].get(name, {"error": ""})]
    output.with_suffix(".md").write_text(markdown(content, missing))
    console.print(Markdown(markdown(content, missing)))
    if missing:
        console.print("the same command continues")


if __name__ == "__main__":
    main()
