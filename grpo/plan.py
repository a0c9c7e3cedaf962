"""Predict whether a run fits before anything is loaded: `python -m grpo.plan`, with the command line of `grpo.train`.

It downloads and imports only what it needs, so that it answers in a second on any machine.
"""

import json
import sys
import tempfile
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table
from rich.text import Text

from grpo.cli import WANTS_TRACEBACK, leave, quoted, start
from grpo.config.messages import meant
from grpo.config.schema import ROOT
from grpo.extras.replay.size import replay_bytes
from grpo.planning.advice import advise
from grpo.planning.duration import Duration, expected_duration
from grpo.planning.fit import Plan, make_plan
from grpo.prepared import checked
from grpo.utils.errors import ConfigError
from grpo.utils.limits import GB
from grpo.utils.terminal import plain_console

PROGRAM = "grpo.plan"
FORMATS = ("text", "json")
KEEPS = ("hydra.run.dir=", "hydra.sweep.dir=", "plan.table=", "plan.longest=")
"""Overrides that keep the directory: its name, or a picture to write."""
PHASES = {"load": "load", "rollout": "rollout", "reward": "reward", "logprobs": "log-probabilities", "update": "update"}


@hydra.main(config_path=str(ROOT / "conf"), config_name="config", version_base="1.3")
def job(config: DictConfig) -> None:
    """Plan a command line and exit with status 1 if it does not fit."""
    sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    try:
        if config.plan.format not in FORMATS:
            raise ConfigError(f"plan.format={config.plan.format}: unknown{meant(config.plan.format, FORMATS)}")
        config, overrides = checked(config, list(HydraConfig.get().overrides.task), loads=False)
        run_dir = Path(HydraConfig.get().runtime.output_dir)
        if config.plan.table or config.plan.longest:
            show_many(config, overrides, run_dir)
            return
        plan = make_plan(config)
        plan.suggestions = advise(overrides, config, plan)
        duration = expected_duration(config, plan)
        replay_gb = replay_bytes(config, plan) / GB if config.replay.keep else 0.0
        others = {"duration": duration.as_dict() if duration else None, "replay_gb": replay_gb}
        content = json.dumps(plan.as_dict() | others, indent=2)
        (run_dir / "plan.json").write_text(content + "\n")
    except ConfigError as error:
        if sweep or WANTS_TRACEBACK:
            raise
        leave(error, PROGRAM)
    if config.plan.format == "json":
        print(content)
    else:
        show(plan, duration, plain_console())
        if replay_gb:
            print(
                f"replay.keep={config.replay.keep}: up to {replay_gb:.2g} GiB in the run directory, beside checkpoints"
            )
    if plan.problem and not sweep:
        sys.exit(1)


def show_many(config: DictConfig, overrides: list[str], run_dir: Path) -> None:
    """Plan, print and draw a table of command lines; drawing takes a second that a single plan does not need.

    Raises:
        ConfigError: two tables are wanted, or nothing in a table can be planned.
    """
    if config.plan.table and config.plan.longest:
        raise ConfigError("plan.table=true plan.longest=true: one table at a time")
    if config.plan.table:
        from grpo.extras.plan_tables.table import draw
        from grpo.extras.plan_tables.table import plan_cells as planned
        from grpo.extras.plan_tables.table import show as show_table
    else:
        from grpo.extras.plan_tables.longest import draw
        from grpo.extras.plan_tables.longest import longest_completions as planned
        from grpo.extras.plan_tables.longest import show as show_table
    content = planned(overrides)
    text, picture = json.dumps(content, indent=2), run_dir / "plan.png"
    (run_dir / "plan.json").write_text(text + "\n")
    draw(content, picture)
    if config.plan.format == "json":
        print(text)
        return
    show_table(content, plain_console())
    plain_console().print(f"{picture}", soft_wrap=True)


def show(plan: Plan, duration: Duration | None, console: Console) -> None:
    """Print a plan: a table of phases, the chosen settings, the verdict, the time, and suggestions."""
    several = f"{plan.processes} x " if plan.processes > 1 else ""
    each = ", memory of each" if several else ""
    console.print(f"{plan.model} on {several}{plan.device}{each}", soft_wrap=True)
    if plan.found:
        console.print(plan.found, soft_wrap=True)
    table = Table("GiB")
    for phase in plan.phases:
        table.add_column(PHASES[phase], justify="right")
    for name in dict.fromkeys(name for parts in plan.phases.values() for name in parts):
        table.add_row(name, *(f"{parts[name]:.2f}" if name in parts else "" for parts in plan.phases.values()))
    table.add_section()
    table.add_row("total", *(f"{sum(parts.values()):.2f}" for parts in plan.phases.values()), style="bold")
    console.print(table)
    left = max(0.0, 1 - plan.peak_gb / plan.capacity_gb)
    console.print(f"peak {plan.peak_gb:.1f} GiB of {plan.capacity_gb:.1f} GiB, {left:.0%} headroom")
    if plan.shared_gb:
        shared = f"of the {plan.shared_gb:.1f} GiB that CPU and GPU share"
        console.print(f"host memory {plan.host_gb:.1f} GiB {shared}", soft_wrap=True)
    elif not plan.unified:
        unknown = "; plan.host_gb=… gives the host memory of a machine that is not this one"
        known = f" of {plan.host_capacity_gb:.1f} GiB" if plan.host_capacity_gb else unknown
        machine = " per machine" if several else ""
        console.print(f"host memory{machine} {plan.host_gb:.1f} GiB{known}")
    if plan.formats:
        formats = " and ".join(plan.formats)
        console.print(f"the GPU also computes in {formats}, which nothing here uses", soft_wrap=True)
    chosen = "  ".join(f"{key}={str(value).lower()}" for key, value in plan.settings.items())
    console.print(f"with {chosen}", soft_wrap=True)
    if plan.problem:
        console.print(Text.assemble(("does not fit", "bold red"), f": {plan.problem}"), soft_wrap=True)
    else:
        console.print("fits", style="bold green")
    unknown = "time: not estimated, as gpu.tflops and gpu.bandwidth_gb_s are not set"
    console.print(str(duration or unknown), soft_wrap=True)
    if plan.suggestions:
        console.print("changes that would fit:" if plan.problem else "changes that would use the GPU better:")
    for suggestion in plan.suggestions:
        overrides = " ".join(suggestion["overrides"])
        effect = f"{suggestion['peak_gb']:.1f} GiB; {suggestion['effect']}"
        console.print(Text.assemble((f"  {overrides}", "bold"), f"\n      {effect}"), soft_wrap=True)


def main() -> None:
    """Run the command line: its directory goes with it, unless it was named or there is a picture in it."""
    with tempfile.TemporaryDirectory(prefix="grpo-plan-") as folder:
        if not any(word.startswith(KEEPS) for word in sys.argv):
            sys.argv += [f"hydra.run.dir={quoted(folder)}", f"hydra.sweep.dir={quoted(folder)}"]
        start(job, PROGRAM)


if __name__ == "__main__":
    main()
