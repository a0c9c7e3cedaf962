"""Everything that only a GPU shows, in one command: `python -m benchmarks.gpu [--minutes 10]`.

Experiments run on any single NVIDIA GPU, each in a process of its own, in an order that gives the most knowledge first.
After each, `benchmarks/gpu.json` is written, and at the end `benchmarks/gpu.md`; the same command continues, and
repeats what was cut off. `--cells` compares speed instead: updates beside those of other trainers, and generation
(`benchmarks/gpu_cells.json`). Nothing is downloaded. `--toy` tries the code without a GPU.
"""

import argparse
import sys
import time
import traceback
from collections.abc import Iterator
from datetime import date
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from hydra import initialize_config_dir
from rich.console import Console
from rich.markdown import Markdown

from benchmarks import gpu_cells, gpu_experiments, memory
from benchmarks.gpu_experiments import EXPERIMENTS, NEEDS_VLLM, REAL, TOY, Scale
from grpo.config.schema import ROOT, register
from grpo.extras.measuring.processes import sent_by
from grpo.rundir.files import read_json, write_json
from grpo.rundir.versions import versions
from grpo.utils.hardware import gpus_of_driver, use_expandable_segments
from grpo.utils.limits import GB, USABLE

LONGEST = 300
"""Seconds after which an experiment is ended."""
LONGEST_CELL = 120
"""The same with `--cells`."""
TOY_CELLS = ("full 0.5B",)


def machine() -> dict[str, Any]:
    """Return what results depend on: GPU, driver and versions."""
    import pynvml

    found: dict[str, Any] = {"device": "cpu", "versions": versions()}
    if gpus := gpus_of_driver():
        found |= {"device": gpus[0].name, "memory_gb": round(gpus[0].total / GB, 1)}
        found |= {"driver": pynvml.nvmlSystemGetDriverVersion(), "cuda": torch.version.cuda}
    return found


def names(toy: bool, cells: bool = False) -> list[str]:
    """Return the experiments in their order.

    Args:
        toy: whether shapes are tiny.
        cells: whether those of `gpu_cells`; else the others, and behind them the cells of docs/memory.md that fit.
    """
    if cells:
        return list(gpu_cells.EXPERIMENTS)
    of_memory: list[str] = list(TOY_CELLS)
    if not toy:
        register()
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            room = USABLE * torch.cuda.get_device_properties(0).total_memory / GB
            planned = memory.plan_cells(None)
        of_memory = [name for name, plan in planned.items() if plan["planned_gb"] + 1.5 <= room]
    return [*EXPERIMENTS, *(f"cell {name}" for name in of_memory)]


def run_in_process(name: str, toy: bool, seconds: float) -> dict[str, Any]:
    """Run an experiment in a process of its own; return its result, an `error`, or why it is `skipped`."""
    if name in NEEDS_VLLM and find_spec("vllm") is None:
        return {"skipped": "vLLM is not installed: make vllm"}
    try:
        result = sent_by(send_result, name, TOY if toy else REAL, seconds=seconds)
    except ChildProcessError as error:
        return {"error": str(error)}
    return result or {"error": f"not done after {seconds:.0f} s", "cut_off": True}


def send_result(name: str, scale: Scale, sender: Connection) -> None:
    """Run an experiment and send its result, or the end of the traceback as its `error`."""
    if name not in NEEDS_VLLM:  # whose sleep mode refuses them; as in grpo.train
        use_expandable_segments()
    try:
        known = gpu_cells.EXPERIMENTS.get(name)
        sender.send(known(scale) if known else gpu_experiments.run(name, scale))
    except Exception:
        sender.send({"error": "\n".join(traceback.format_exc().splitlines()[-12:])})


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
    parser.add_argument("--cells", action="store_true", help="the speed of updates and of generation")
    parser.add_argument("--toy", action="store_true", help="tiny shapes, also without a GPU, to try the code")
    parser.add_argument("--output", type=Path, help="JSON file; a .md file is written beside it; default: gpu.json")
    options = parser.parse_args()
    if not (options.toy or torch.cuda.is_available()):
        sys.exit("benchmarks.gpu: needs an NVIDIA GPU; --toy tries the code without one")
    console, until = Console(), time.monotonic() + 60 * options.minutes
    name = "gpu_cells" * options.cells or "gpu"
    output = options.output or ROOT / "benchmarks" / f"{name}{'_toy' * options.toy}.json"
    content = {"toy": options.toy, **machine()}
    known = read_json(output)
    same = all(known.get(key) == value for key, value in content.items())
    content["results"] = {
        name: result for name, result in known.get("results", {}).items() if same and "error" not in result
    }
    order = names(options.toy, options.cells)
    for name in order:
        left = until - time.monotonic()
        if name not in content["results"] and left > 0:
            started = time.monotonic()
            result = run_in_process(name, options.toy, min(LONGEST_CELL if options.cells else LONGEST, left))
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
