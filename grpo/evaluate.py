"""Evaluate a policy on held-out problems: greedy accuracy, pass@k, maj@k, accuracy by difficulty.

`python -m grpo.evaluate` takes the command line of `grpo.train`, and before it the directory of a run or a model:
`python -m grpo.evaluate outputs/2026-01-01/12-00-00 task.eval.size=1000 evaluate.samples=16`. Every completion is kept;
after an interruption the same command continues.
"""

import hashlib
import logging
import sys
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.table import Table

from grpo.cli import WANTS_TRACEBACK, leave, output_in, quick_imports, quoted, start
from grpo.config.mixture import limit_of, single_tasks
from grpo.config.schema import ROOT
from grpo.prepared import checked, take_gpu
from grpo.rundir.files import write_json
from grpo.rundir.history import named_run
from grpo.rundir.run_dir import read_run
from grpo.rundir.summary import with_interval
from grpo.utils.errors import ConfigError, RunError
from grpo.utils.hardware import check_pytorch_sees_gpu
from grpo.utils.spoken import shown
from grpo.utils.terminal import plain_console

PROGRAM = "grpo.evaluate"
log = logging.getLogger(__name__)


@hydra.main(config_path=str(ROOT / "conf"), config_name="config", version_base="1.3")
def job(config: DictConfig) -> float:
    """Evaluate a model; return its greedy accuracy."""
    try:
        config, _ = checked(config, [], starts=False)
        if config.evaluate.samples < 0 or config.evaluate.batch_size < 1 or config.evaluate.temperature <= 0:
            raise ConfigError("evaluate: samples from 0, temperature above 0, batch_size from 1")
        if not config.task.eval.size:
            raise ConfigError("task.eval.size=0: there are no problems to evaluate on")
        if config.task.tools or config.task.environment:
            raise ConfigError("task.tools: only a run evaluates a policy with its tools, before and after its training")
        return evaluate_in(Path(HydraConfig.get().runtime.output_dir), config)
    except Exception as error:
        if WANTS_TRACEBACK:
            raise
        leave(error, PROGRAM)
    except KeyboardInterrupt:
        leave(RunError("interrupted; the same command continues from here", status=130), PROGRAM)


def evaluate_in(output: Path, config: DictConfig) -> float:
    """Evaluate a model into `output` and return its greedy accuracy.

    Raises:
        ConfigError: the input is wrong.
        RunError: the evaluation failed; the log has the traceback.
    """
    take_gpu(config)
    if not config.train.use_cpu:
        check_pytorch_sees_gpu()
    with quick_imports():
        from grpo.evaluation.model import evaluate_model

    console, tasks = plain_console(file=sys.stderr), single_tasks(config.task)
    limits = {name: limit_of(name, config.task, config.train) for name in tasks}
    try:
        with output_in(output / "train.log"):
            result = evaluate_model(config, tasks, limits, output, console)
    except (ConfigError, RunError):
        raise
    except Exception as error:
        log.exception("the evaluation failed")
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise RunError(f"failed: {reason}; the traceback is in {shown(output / 'train.log')}") from error
    write_json(output / "evaluation.json", result)
    show(result, output)
    return result["accuracy"]


def show(result: dict[str, Any], output: Path) -> None:
    """Print the result as a table."""
    table = Table(title=f"{result['model']} by {result['engine']}", show_header=False, title_justify="left")
    table.add_row("greedy", with_interval(result["accuracy"], result["interval"]) + f"  {result['samples']} problems")
    for value, part in result.get("by_difficulty", {}).items():
        table.add_row(
            f"  difficulty {value}", with_interval(part["accuracy"], part["interval"]) + f"  {part['samples']} problems"
        )
    for name, part in result.get("by_task", {}).items():
        table.add_row(f"  {name}", with_interval(part["accuracy"], part["interval"]) + f"  {part['samples']} problems")
        for measure in ("pass@k", "maj@k"):
            for k, estimate in part.get(measure, {}).items():
                text = with_interval(estimate["value"], estimate["interval"])
                table.add_row(f"  {name}, {measure.replace('k', k)}", text)
    for name in ("pass@k", "maj@k"):
        for k, estimate in result.get(name, {}).items():
            table.add_row(name.replace("k", k), with_interval(estimate["value"], estimate["interval"]))
    for kind, count in result.get("grader_errors", {}).items():
        table.add_row("not graded", f"{count} completions: {kind}", style="red")
    table.add_row("in", shown(output))
    plain_console().print(table)


def command_line(arguments: list[str]) -> list[str]:
    """Return the command line with overrides in place of the run directory or model that may precede them.

    A run is evaluated with its own configuration, into its own directory. Otherwise the directory follows from the
    command line, so that the same command continues after an interruption.
    """
    named, overrides = None, arguments
    if arguments and not arguments[0].startswith("-") and ("=" not in arguments[0] or Path(arguments[0]).is_dir()):
        named, overrides = arguments[0], arguments[1:]
    folder = named_run(named) if named else Path()
    if named and (folder / ".hydra").is_dir():
        run = read_run(folder)
        model, output = (
            f"evaluate.model={quoted(str(run.model))}",
            f"hydra.run.dir={quoted(str(run.folder / 'evaluate'))}",
        )
        return [*run.config_flags, *run.overrides, model, output, *overrides]
    if named:
        check_model(named)
        overrides = [f"evaluate.model={quoted(named)}", *overrides]
    digest = hashlib.sha256(repr(sorted(overrides)).encode()).hexdigest()[:8]
    return (
        [*overrides, f"hydra.run.dir=outputs/evaluate/{digest}"] if "hydra.run.dir" not in str(overrides) else overrides
    )


def check_model(name: str) -> None:
    """Check that `name` can be a model: a folder that holds one, or a name on the hub.

    Raises:
        ConfigError: there is no such model.
    """
    folder = Path(name)
    if folder.is_dir():
        if not any((folder / file).is_file() for file in ("config.json", "adapter_config.json")):
            raise ConfigError(f"{name}: neither a run directory (no .hydra) nor a model (no config.json)")
    elif folder.is_absolute() or Path(folder.parts[0]).is_dir() or name.startswith(".") or name.count("/") != 1:
        raise ConfigError(f"{name}: there is no such directory")


def main() -> None:
    """Run the command line."""
    try:
        sys.argv[1:] = command_line(sys.argv[1:])
    except ConfigError as error:
        leave(error, PROGRAM)
    start(job, PROGRAM)


if __name__ == "__main__":
    main()
