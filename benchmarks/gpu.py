"""Everything that only a GPU shows, in one command: `python -m benchmarks.gpu [--minutes 10]`.

Experiments run on any single NVIDIA GPU, each in a process of its own, in an order that gives the most knowledge first.
After each, `benchmarks/gpu.json` and `benchmarks/gpu.md` are written; the same command continues where it was cut off.
Nothing is downloaded. `--toy` tries the code without a GPU.
"""

import argparse
import json
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from hydra import initialize_config_dir
from rich.console import Console
from rich.markdown import Markdown

from benchmarks import gpu_experiments, memory
from benchmarks.gpu_experiments import EXPERIMENTS, REAL, TOY
from grpo.config.schema import ROOT, register
from grpo.hardware import gpus_of_driver, use_expandable_segments
from grpo.limits import GB, USABLE
from grpo.runs.files import read_json, write_json
from grpo.runs.versions import versions

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
    behind = order.index("vllm") + 1
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


def markdown(content: dict[str, Any]) -> str:
    """Return the results as one table."""
    about = [f"{key}: {value}" for key, value in content.items() if key not in ("results", "versions")]
    about.append("versions: " + ", ".join(f"{name} {number}" for name, number in content["versions"].items()))
    lines = ["# On a GPU", "", "; ".join(about), "", "| experiment | seconds | result |", "|---|---|---|"]
    for name, result in content["results"].items():
        shown = {key: value for key, value in result.items() if key != "seconds"}
        text = json.dumps(rounded(shown)).replace("|", "\\|").replace("\\n", " ")
        lines.append(f"| {name} | {result['seconds']:.0f} | {text} |")
    return "\n".join(lines) + "\n"


def rounded(value: Any) -> Any:
    """Return a result with three digits of each number."""
    if isinstance(value, float):
        return float(f"{value:.3g}")
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    return [rounded(part) for part in value] if isinstance(value, list) else value


def main() -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="begin no experiment after this time; default: 10")
    parser.add_argument("--toy", action="store_true", help="tiny shapes, also without a GPU, to try the code")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "gpu.json", help="and the same with .md")
    parser.add_argument("--experiment", help=argparse.SUPPRESS)  # for the processes of the experiments
    options = parser.parse_args()
    use_expandable_segments()
    if options.experiment:
        result = gpu_experiments.run(options.experiment, TOY if options.toy else REAL)
        print(RESULT + json.dumps(result), flush=True)
        return
    if not (options.toy or torch.cuda.is_available()):
        sys.exit("benchmarks.gpu: needs an NVIDIA GPU; --toy tries the code without one")
    console, until = Console(), time.monotonic() + 60 * options.minutes
    content = {"date": str(date.today()), **machine()}
    known = read_json(options.output)
    same = all(known.get(key) == content.get(key) for key in ("device", "driver", "versions"))
    content["results"] = {
        name: result for name, result in known.get("results", {}).items() if same and "error" not in result
    }
    for name in names(options.toy):
        left = until - time.monotonic()
        if name in content["results"] or left <= 0:
            continue
        started = time.monotonic()
        result = run_in_process(name, options.toy, min(LONGEST, left))
        content["results"][name] = {**result, "seconds": round(time.monotonic() - started, 1)}
        console.print(f"{name}: {result}", highlight=False, soft_wrap=True, markup=False)
        write_json(options.output, content)
        options.output.with_suffix(".md").write_text(markdown(content))
    console.print(Markdown(markdown(content)))
    missing = [name for name in names(options.toy) if "error" in content["results"].get(name, {"error": ""})]
    if missing:
        console.print(f"not done: {', '.join(missing)}; the same command continues", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
