"""One run: check the machine, load, evaluate, train, evaluate, save, report."""

import contextlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
import transformers
from datasets import Dataset
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table
from transformers import PrinterCallback
from trl import GRPOConfig

from grpo import policy
from grpo.callbacks import HostMemoryGuard, MetricsFile, ProgressBar, StopOnSignal
from grpo.check import check_batch
from grpo.config import ROOT, ConfigError, RunError, train_arguments
from grpo.data import load_task
from grpo.evaluate import evaluate
from grpo.fit import Plan
from grpo.hardware import check_gpu
from grpo.readings import MemoryReadings
from grpo.resume import resolve
from grpo.trainer import DoesNotFit, ExactGRPOTrainer, Update
from rewards.correctness import correctness
from rewards.loader import load

log = logging.getLogger(__name__)
PACKAGES = ["torch", "transformers", "trl", "peft", "bitsandbytes", "datasets", "accelerate", "hydra-core", "omegaconf"]


def run(config: DictConfig, run_dir: Path, plan: Plan | None = None) -> dict[str, Any]:
    """Train as configured, fill the run directory, and return what `summary.json` holds.

    Args:
        plan: what was predicted for the run; kept beside it and compared with what it took.

    Raises:
        ConfigError: the input was wrong; nothing has been trained.
        RunError: the run broke; the log has the traceback.
    """
    started = time.monotonic()
    summary: dict[str, Any] = {"status": "failed", "reason": None}
    console = Console(file=sys.stderr)
    memory = MemoryReadings()
    try:
        if plan:
            write_json(run_dir / "plan.json", plan.as_dict())
        if config.plan.enforce:
            check_gpu(config.gpu)
        checkpoint = resolve(config.train.resume_from_checkpoint, run_dir)
        if config.train.resume_from_checkpoint:
            told = f"going on from {os.path.relpath(checkpoint)}" if checkpoint else "nothing to go on with: a new run"
            console.print(told, highlight=False, soft_wrap=True)
        policy.make_available(config.model)
        with output_in(run_dir / "train.log"):
            train(config, run_dir, checkpoint, console, summary, memory)
    except ConfigError as error:
        log.exception("the input is wrong")
        summary["reason"] = str(error)
        raise
    except KeyboardInterrupt:
        summary |= {"status": "stopped", "reason": "interrupted at once, without a checkpoint of the last steps"}
    except Exception as error:
        log.exception("the run failed")
        kind = "" if isinstance(error, DoesNotFit) else f"{type(error).__name__}: "
        summary["reason"] = f"{kind}{error}".splitlines()[0]
        where = os.path.relpath(run_dir / "train.log")
        raise RunError(f"failed: {summary['reason']}; the traceback is in {where}") from error
    finally:
        memory.note()
        summary |= {
            "wall_time_s": round(time.monotonic() - started, 1),
            **memory.highest,
            "planned_gb": plan.expected() if plan else None,
            "versions": {name: version(name) for name in PACKAGES},
            "git_commit": git_commit(),
        }
        write_json(run_dir / "summary.json", summary)
    report(summary, run_dir)
    return summary


def train(
    config: DictConfig,
    run_dir: Path,
    checkpoint: Path | None,
    console: Console,
    summary: dict[str, Any],
    memory: MemoryReadings,
) -> None:
    """Do the run, from `checkpoint` if there is one, and put its outcome into `summary` and `memory` as it goes."""
    problems, held_out = load_task(config.task)
    stop = StopOnSignal()
    guard = HostMemoryGuard(config.plan.host_gb)
    callbacks = [MetricsFile(run_dir / "metrics.jsonl"), ProgressBar(console), stop, guard]
    trainer = make_trainer(config, run_dir, problems)
    trainer.memory = memory
    for callback in callbacks:
        trainer.add_callback(callback)

    evaluation_file = run_dir / "evaluation.json"
    evaluation = json.loads(evaluation_file.read_text()) if checkpoint and evaluation_file.exists() else {}
    summary |= {"accuracy_before": None, "accuracy_after": None}
    if held_out:
        if "before" not in evaluation:
            evaluation["before"] = evaluate_policy(trainer, held_out, config, console)
            write_json(evaluation_file, evaluation)
        summary["accuracy_before"] = evaluation["before"]["accuracy"]

    try:
        with stop:
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    finally:
        summary["steps"] = trainer.state.global_step
    if trainer.stop_reason or guard.reason or stop.received:
        reason = trainer.stop_reason or guard.reason or f"{stop.received} after step {summary['steps']}"
        summary |= {"status": "stopped", "reason": reason}
        return
    trainer.save_model(str(run_dir / "model"))
    (run_dir / "model" / "training_args.bin").unlink(missing_ok=True)  # a pickle; `.hydra` says the same in words
    if held_out:
        evaluation["after"] = evaluate_policy(trainer, held_out, config, console)
        write_json(evaluation_file, evaluation)
        summary["accuracy_after"] = evaluation["after"]["accuracy"]
    summary["status"] = "completed"


def make_trainer(config: DictConfig, run_dir: Path, problems: Dataset) -> ExactGRPOTrainer:
    """Return the trainer for a composed configuration.

    Raises:
        ConfigError: TRL, transformers or PEFT refused it.
    """
    check_batch(config.train, len(problems))
    arguments = train_arguments(config.train)
    arguments.pop("resume_from_checkpoint", None)
    user_init_kwargs = arguments.pop("model_init_kwargs", {})
    try:
        trainer = ExactGRPOTrainer(
            model=config.model.model_name_or_path,
            reward_funcs=load_rewards(config),
            args=GRPOConfig(
                output_dir=str(run_dir),
                model_init_kwargs={**policy.model_init_kwargs(config.model), **user_init_kwargs},
                reward_weights=[reward.get("weight", 1.0) for reward in config.reward.values()],
                disable_tqdm=True,
                **arguments,
            ),
            train_dataset=problems,
            quantization_config=policy.quantization_config(config.peft),
            peft_config=policy.peft_config(config.peft),
            update=Update(**config["update"]),  # `.update` is a method
        )
    except (ValueError, TypeError, ImportError, NotImplementedError, OSError) as error:
        raise ConfigError(" ".join(str(error).split())) from error
    trainer.remove_callback(PrinterCallback)
    policy.keep_differentiable(trainer.model)
    return trainer


def load_rewards(config: DictConfig) -> list[Callable[..., Any]]:
    """Return the reward functions in the order of the configuration."""
    rewards: dict[str, Any] = OmegaConf.to_container(config.reward, resolve=True)  # type: ignore[assignment]
    return [load(reward["fn"], name, reward.get("kwargs")) for name, reward in rewards.items()]


def evaluate_policy(
    trainer: ExactGRPOTrainer, held_out: Dataset, config: DictConfig, console: Console
) -> dict[str, Any]:
    """Evaluate the policy as it is now; what a right answer is, `correctness` says, whatever is rewarded."""
    return evaluate(
        model=trainer.accelerator.unwrap_model(trainer.model),
        tokenizer=trainer.processing_class,
        problems=held_out,
        reward=correctness,
        length=config.train.max_completion_length,
        batch_size=config.train.per_device_eval_batch_size,
        console=console,
    )


@contextlib.contextmanager
def output_in(file: Path) -> Iterator[None]:
    """Send what the libraries print and warn where Hydra sends what they log, so that the terminal shows the run."""
    for library in (transformers, datasets):
        library.utils.logging.disable_progress_bar()
        library.utils.logging.enable_propagation()
    transformers.utils.logging.disable_default_handler()
    logging.captureWarnings(True)
    with file.open("a", buffering=1) as stream, contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        yield


def report(summary: dict[str, Any], run_dir: Path) -> None:
    """Print the outcome as a table."""
    table = Table(title=f"GRPO run {summary['status']}", show_header=False, title_justify="left")
    evaluation_file = run_dir / "evaluation.json"
    evaluation = json.loads(evaluation_file.read_text()) if evaluation_file.exists() else {}
    for when, outcome in evaluation.items():
        low, high = outcome["interval"]
        table.add_row(f"accuracy {when}", f"{outcome['accuracy']:.1%}  (95 % interval {low:.1%} to {high:.1%})")
    if evaluation:
        table.add_row("held out", f"{evaluation['before']['samples']} problems, answered greedily")
    for row in memory_rows(summary):
        table.add_row(*row)
    table.add_row("time", f"{summary['wall_time_s']:.0f} s, {summary.get('steps', 0)} steps")
    table.add_row("run directory", os.path.relpath(run_dir))
    for name in ("model", "metrics.jsonl", "completions", "evaluation.json", "plan.json", "summary.json", "train.log"):
        if (run_dir / name).exists():
            table.add_row("", name)
    Console().print(table)


def memory_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what the run took beside what was planned, GB."""
    planned = summary["planned_gb"] or {}
    host = f"{summary['memory/host_gb']:.1f} GB of host memory"
    if "memory/peak_allocated_gb" not in summary:
        rows = [("peak memory", f"planned {planned['peak']:.1f} GB, used {host}" if planned else host)]
    else:
        used = f"{summary['memory/peak_allocated_gb']:.1f} GB of GPU memory"
        used += f" ({summary['memory/peak_reserved_gb']:.1f} GB reserved)"
        rows = [("peak memory", f"planned {planned['peak']:.1f} GB, used {used}" if planned else used), ("", host)]
    for phase in ("generate", "logprobs", "update"):
        if planned and f"memory/{phase}_gb" in summary:
            rows.append(("", f"{phase}: planned {planned[phase]:.1f} GB, used {summary[f'memory/{phase}_gb']:.1f} GB"))
    return rows


def git_commit() -> str | None:
    """Return the commit of this project's checkout, or None without one."""
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write so that a reader never sees half a file."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    partial.replace(path)
