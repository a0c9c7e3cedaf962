"""One run, top to bottom: resolve, prepare, evaluate, train, evaluate, write."""

import logging
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from grpo.cli import output_in
from grpo.config.batch import completions, evaluated_at_once, longest_request
from grpo.config.secrets import without_secrets
from grpo.data.images import check_used
from grpo.data.rewards import (
    check_grader,
    counts,
    errors_of,
    errors_of_all,
    grader_of,
    reward_options,
    running_rewards,
    useless,
)
from grpo.data.task import Problems, load_task, reward_columns
from grpo.evaluation.in_training import evaluate_policy
from grpo.generation.vllm_server import check_server, check_vllm, server_url
from grpo.model import policy
from grpo.planning.fit import Plan, settled
from grpo.planning.from_config import find_shape
from grpo.run.callbacks import (
    DiskGuard,
    HostMemoryGuard,
    MetricsFile,
    MismatchWarning,
    ProgressBar,
    StopOnSignal,
    WhenSharded,
)
from grpo.run.monitor import Monitor
from grpo.run.outcome import ends_when_stuck, give_way, reason_of, write_outcome
from grpo.run.trainer import make_trainer
from grpo.rundir.files import ERRORS_FILE, RESOLVED_CONFIG, read_json, write_json
from grpo.rundir.resume import differences, resolve
from grpo.rundir.storage import storage_fault
from grpo.rundir.summary import report
from grpo.rundir.versions import git_commit, versions
from grpo.tools.running import Tools, running_tools
from grpo.trainer import ExactGRPOTrainer
from grpo.trainer.memory_readings import MemoryReadings
from grpo.trainer.resume import keep_steps, save_model
from grpo.utils.distributed import agreed, is_main_process, log_name
from grpo.utils.errors import ConfigError, DirectoryLost, RunError
from grpo.utils.hardware import gpu_utilization
from grpo.vllm_lora import sends_adapter, why_merged, why_not_shared
from rewards.isolation.reward import Reward, RewardError

log = logging.getLogger(__name__)


def run(config: DictConfig, run_dir: Path, plan: Plan | None = None) -> dict[str, Any]:
    """Train as configured, fill the run directory, and return the content of `summary.json`.

    Args:
        plan: prediction for the run; kept beside it and compared with the readings.

    Raises:
        ConfigError: the input was wrong; nothing has been trained.
        RunError: the run broke; the log has the traceback.
    """
    with ends_when_stuck(run_dir), StopOnSignal() as stop:
        summary = run_until(stop, config, run_dir, plan)
    if is_main_process():
        report(summary, run_dir)
    return summary


def run_until(stop: StopOnSignal, config: DictConfig, run_dir: Path, plan: Plan | None) -> dict[str, Any]:
    """Do what `run` does, until a signal; the outcome is written in any case."""
    start, console = time.monotonic(), Console(file=sys.stderr, quiet=not is_main_process())
    memory = MemoryReadings(on_gpu=torch.cuda.is_available() and not config.train.use_cpu)
    summary: dict[str, Any] = {"status": "failed", "reason": None}
    if is_main_process():
        write_json(run_dir / "summary.json", {"status": "running", "reason": None})
    trainer = None
    try:
        checkpoint = checkpoint_for(config, run_dir, console)
        config = with_model(settled(config, plan))
        with output_in(run_dir / log_name()), running_tools(config.task, run_dir) as tools:
            processing_class = policy.load_processing_class(config.model)
            problems = problems_of(config, processing_class, tools, console)
            if is_main_process():
                write_decisions(config, plan, run_dir)
            summary |= {"data": problems.counts, "completions_a_step": completions(config.train, None)}
            summary |= {"accuracy_before": None, "accuracy_after": None}
            columns, errors_file = reward_columns(problems.train), run_dir / ERRORS_FILE
            with running_rewards(options_of_rewards(config, problems), columns, run_dir, errors_file) as rewards:
                trainer = make_trainer(config, run_dir, problems, processing_class, rewards, tools, memory)
                utilization = gpu_utilization if memory.on_gpu else None
                try:
                    with Monitor(memory, utilization, run_dir, console) as monitor:
                        held_out = (config, run_dir, problems.held_out, rewards, console)
                        evaluate_first(trainer, partial(evaluated, "before", trainer, *held_out), summary, stop)
                        summary |= train(trainer, config, run_dir, checkpoint, rewards, console, monitor, stop)
                        if summary["status"] == "completed":
                            stop.begin("saving the model")
                            save_model(trainer, run_dir / "model")
                            stop.begin("evaluating after the training")
                            summary |= evaluated("after", trainer, *held_out)
                        summary |= {"reward_errors": errors_of_all(rewards)}
                finally:
                    summary = {"reward_errors": errors_of(rewards), **summary, "steps": trainer.state.global_step}
    except ConfigError as error:
        log.exception("invalid input")
        summary |= {"status": "failed", "reason": str(error)}
        raise
    except KeyboardInterrupt as error:
        give_way(summary)
        summary |= {"status": "stopped", "reason": str(error) or "interrupted"}
        if trainer and stop.activity:  # with all steps done, or none
            keep_steps(trainer)
    except DirectoryLost:
        raise
    except Exception as error:
        log.exception("the run failed")
        summary |= {"status": "failed", "reason": reason_of(error, run_dir)}
        where = f"; the traceback is in {os.path.relpath(run_dir / log_name())}" if run_dir.is_dir() else ""
        raise RunError(f"failed: {summary['reason']}{where}") from error
    finally:
        memory.note()
        summary |= {"wall_time_s": round(time.monotonic() - start, 1), **memory.highest}
        summary |= {"planned_gb": plan.expected() if plan else None}
        summary |= {"versions": versions(), "git_commit": git_commit()}
        if not isinstance(sys.exception(), DirectoryLost):  # there, another run may be
            write_outcome(summary, run_dir)
    return summary


def write_decisions(config: DictConfig, plan: Plan | None, run_dir: Path) -> None:
    """Write the configuration that is run, and the plan."""
    OmegaConf.save(without_secrets(config), run_dir / RESOLVED_CONFIG)
    if plan:
        write_json(run_dir / "plan.json", plan.as_dict())


def checkpoint_for(config: DictConfig, run_dir: Path, console: Console) -> Path | None:
    """Return the checkpoint to resume from, if there is one, and say so.

    Raises:
        ConfigError: one was asked for by name and is not there, or it is that of another run than this.
    """
    resume_from = config.train.resume_from_checkpoint
    found = agreed("checkpoint", lambda: str(resolve(resume_from, run_dir) or ""))  # read whole, by one process
    checkpoint = Path(found) if found else None
    if checkpoint and (other := differences(config, checkpoint)):
        if resume_from in ("auto", True):
            raise ConfigError(
                f"{os.path.relpath(checkpoint)} is of a run with {other}; "
                f"train.resume_from_checkpoint={os.path.relpath(checkpoint)} continues it all the same"
            )
        console.print(f"continues a checkpoint of a run with {other}", highlight=False, soft_wrap=True)
    if resume_from:
        what = f"resuming from {os.path.relpath(checkpoint)}" if checkpoint else "nothing to resume: starting a new run"
        console.print(what, highlight=False, soft_wrap=True)
    if checkpoint is None and is_main_process():
        (run_dir / "evaluation.json").unlink(missing_ok=True)  # of a run that left no checkpoint
    return checkpoint


def with_model(config: DictConfig) -> DictConfig:
    """Return the configuration with its model on this machine, once vLLM and its server are known to be there.

    Raises:
        ConfigError: one of them is not.
    """
    train, model = config.train, config.model
    if train.use_vllm:
        by_adapter, has_gpu = sends_adapter(config), torch.cuda.is_available() and not train.use_cpu
        check_vllm(train, has_gpu or by_adapter, bool(config.peft and config.peft.get("quantization")))
    config = config.copy()
    config.model = policy.available(model)
    if train.use_vllm and train.vllm_mode == "server":
        adapter = config.peft if by_adapter else None
        check_server(train, config.model.model_name_or_path, longest_request(config), adapter)
    return config


def problems_of(config: DictConfig, processing_class: Any, tools: Tools, console: Console) -> Problems:
    """Load the problems, and say what there is, what the policy may call, and who generates.

    Raises:
        ConfigError: the data cannot be loaded.
    """
    check_used(config, processing_class)
    described, train = tools.described(), config.train
    problems = load_task(config.task, processing_class, described)
    console.print(str(problems), highlight=False, soft_wrap=True)
    if names := ", ".join(tool.__name__ for tool in described):
        console.print(f"the policy may call {names}", highlight=False, soft_wrap=True)
    if train.use_vllm:
        where = {"colocate": "in this process", "server": f"on {server_url(train)}"}[train.vllm_mode]
        ahead = ", during the update of the step before" if config.engine.staleness else ""
        console.print(f"vLLM generates, {where}{ahead}{how_lora_travels(config)}", highlight=False, soft_wrap=True)
    return problems


def how_lora_travels(config: DictConfig) -> str:
    """Return what vLLM gets of a policy with LoRA, and why, as the end of a sentence."""
    if config.peft is None:
        return ""
    if sends_adapter(config):
        gets = "; it gets the adapter before each generation"
        if config.engine.share_weights:
            return f"{gets}, and the frozen weights exist once"
        reason = why_not_shared(config, find_shape(config.model).model_type)
        return f"{gets}, and has frozen weights of its own{f': {reason}' if reason else ''}"
    reason = why_merged(config) or f"engine.lora={config.engine.lora}"
    return f"; it gets all weights before each generation, with the adapter merged in: {reason}"


def options_of_rewards(config: DictConfig, problems: Problems) -> dict[str, dict[str, Any]]:
    """Return the options of the rewards to train by and, if problems are held out, of their grader."""
    grader = grader_of(config.task.eval.reward, config.reward, config.train) if problems.held_out else {}
    return reward_options(config.reward) | grader


def evaluated(
    when: str,
    trainer: ExactGRPOTrainer,
    config: DictConfig,
    run_dir: Path,
    held_out: Dataset | None,
    rewards: dict[str, Reward],
    console: Console,
) -> dict[str, float]:
    """Evaluate the policy `before` or `after` training, unless that has been done, and return its accuracy."""
    if held_out is None:
        return {}
    file, grader = run_dir / "evaluation.json", rewards[config.task.eval.reward]
    known = read_json(file)
    if when == "after" or when not in known:
        check_grader(grader)
        known[when] = evaluate_policy(
            trainer,
            held_out,
            grader,
            length=config.train.max_completion_length,
            batch_size=evaluated_at_once(config),
            difficulty=config.task.eval.difficulty,
            file=run_dir / f"evaluation_{when}.jsonl",
            console=console,
        )
        if is_main_process():
            write_json(file, known)
    return {f"accuracy_{when}": known[when]["accuracy"]}


def evaluate_first(
    trainer: ExactGRPOTrainer, before: Callable[[], dict[str, float]], summary: dict[str, Any], stop: StopOnSignal
) -> None:
    """Add the accuracy `before` to the summary: now, or once training has sharded the policy."""
    if trainer.sharded:
        trainer.add_callback(WhenSharded(stop, lambda: summary.update(before())))
    else:
        stop.begin("evaluating before the training")
        summary |= before()


def train(
    trainer: ExactGRPOTrainer,
    config: DictConfig,
    run_dir: Path,
    checkpoint: Path | None,
    rewards: dict[str, Reward],
    console: Console,
    monitor: Monitor,
    stop: StopOnSignal,
) -> dict[str, Any]:
    """Train, from `checkpoint` if there is one, and return `status` and `reason`: completed, or stopped and why.

    Raises:
        RewardError: a reward has failed on every completion, so that nothing has been learned by it.
    """
    before = counts(rewards)
    guard = HostMemoryGuard(config.plan.host_gb)
    progress = ProgressBar(console, f"rewards/{config.task.eval.reward}/mean", list(rewards.values()))
    mismatch = MismatchWarning(console, config.train)
    disk = DiskGuard(run_dir, console)
    for callback in (monitor, MetricsFile(run_dir / "metrics.jsonl"), progress, stop, guard, mismatch, disk):
        trainer.add_callback(callback)
    try:
        stop.begin(None)
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except DirectoryLost:
        raise
    except Exception as error:
        if not storage_fault(error, run_dir):
            keep_steps(trainer)
        raise
    reason = trainer.stop_reason or guard.reason
    if stop.received and not reason:
        reason = f"{stop.received} after step {trainer.state.global_step}"
    if (problem := useless(rewards, before)) and not reason:
        raise RewardError(problem)
    return {"status": "stopped" if reason else "completed", "reason": reason}
