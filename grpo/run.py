"""One run: check the machine, load, evaluate, train, evaluate, save, report."""

import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from omegaconf import DictConfig
from rich.console import Console
from transformers import PrinterCallback
from trl import GRPOConfig

from grpo import policy
from grpo.callbacks import HostMemoryGuard, MetricsFile, MismatchWarning, ProgressBar, StopOnSignal
from grpo.cli import output_in
from grpo.config.batch import check_batch, completions
from grpo.config.schema import train_arguments
from grpo.data import Problems, load_task, prompt_lengths
from grpo.distributed import is_main_process
from grpo.errors import ConfigError, GenerationError, RunError
from grpo.evaluation.loop import Decoding, evaluate
from grpo.generation.local import Generate, complete
from grpo.generation.vllm_engine import BATCH, answer
from grpo.generation.vllm_server import check_room, check_server, check_vllm, server_url
from grpo.planning.fit import Plan
from grpo.reporting.page import write_report
from grpo.reward import check_grader, grader_of, reward_options, running_rewards
from grpo.runs.files import ERRORS_FILE, write_json
from grpo.runs.resume import resolve
from grpo.runs.summary import report
from grpo.runs.versions import git_commit, versions
from grpo.trainer import DoesNotFit, ExactGRPOTrainer, Update
from grpo.trainer.memory_readings import MemoryReadings
from rewards.runtime.isolation import Reward, RewardError

log = logging.getLogger(__name__)


def run(config: DictConfig, run_dir: Path, plan: Plan | None = None) -> dict[str, Any]:
    """Train as configured, fill the run directory, and return what `summary.json` holds.

    Args:
        plan: what was predicted for the run; kept beside it and compared with what it took.

    Raises:
        ConfigError: the input was wrong; nothing has been trained.
        RunError: the run broke; the log has the traceback.
    """
    start = time.monotonic()
    summary: dict[str, Any] = {"status": "failed", "reason": None}
    console = Console(file=sys.stderr)
    memory = MemoryReadings()
    try:
        if plan:
            write_json(run_dir / "plan.json", plan.as_dict())
        checkpoint = resolve(config.train.resume_from_checkpoint, run_dir)
        if config.train.resume_from_checkpoint:
            told = f"going on from {os.path.relpath(checkpoint)}" if checkpoint else "nothing to go on with: a new run"
            console.print(told, highlight=False, soft_wrap=True)
        check_vllm(config, has_gpu=torch.cuda.is_available() and not config.train.use_cpu)
        policy.make_available(config.model)
        if config.train.use_vllm and config.train.vllm_mode == "server":
            check_server(config)
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
        kind = "" if isinstance(error, DoesNotFit | GenerationError | RewardError) else f"{type(error).__name__}: "
        summary["reason"] = f"{kind}{error}".splitlines()[0]
        where = os.path.relpath(run_dir / "train.log")
        raise RunError(f"failed: {summary['reason']}; the traceback is in {where}") from error
    finally:
        memory.note()
        summary |= {
            "wall_time_s": round(time.monotonic() - start, 1),
            **memory.highest,
            "planned_gb": plan.expected() if plan else None,
            "versions": versions(),
            "git_commit": git_commit(),
        }
        write_json(run_dir / "summary.json", summary)
        (run_dir / "README.md").unlink(missing_ok=True)  # TRL's card without contents; `grpo.export` writes a real one
        if is_main_process():
            try:
                write_report(run_dir)
            except Exception:  # the run is what counts
                log.exception("no page could be written")
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
    tokenizer = policy.load_tokenizer(config.model)
    problems = load_task(config.task, tokenizer)
    summary["data"] = problems.counts
    console.print(str(problems), highlight=False, soft_wrap=True)
    if config.train.use_vllm:
        prepare_vllm(config, problems, tokenizer, console)
    judge = config.task.eval.reward
    stop = StopOnSignal()
    guard = HostMemoryGuard(config.plan.host_gb)
    summary |= {"accuracy_before": None, "accuracy_after": None, "completions_a_step": completions(config.train, None)}
    options = reward_options(config) | (grader_of(config) if problems.held_out else {})
    with running_rewards(options, problems.train.column_names, run_dir, run_dir / ERRORS_FILE) as rewards:
        if problems.held_out:
            check_grader(rewards[judge])
        trainer = make_trainer(config, run_dir, problems.train, [rewards[name] for name in config.reward])
        trainer.memory = memory
        progress = ProgressBar(console, f"rewards/{judge}/mean", list(rewards.values()))
        mismatch = MismatchWarning(console, config.train)
        for callback in (MetricsFile(run_dir / "metrics.jsonl"), progress, stop, guard, mismatch):
            trainer.add_callback(callback)

        def evaluated(when: str) -> None:
            if problems.held_out is None:
                return
            file = run_dir / "evaluation.json"
            known = json.loads(file.read_text()) if (checkpoint or when == "after") and file.exists() else {}
            if when == "after" or when not in known:
                answers = run_dir / f"evaluation_{when}.jsonl"
                known[when] = evaluate_policy(trainer, problems.held_out, rewards[judge], config, answers, console)
                write_json(file, known)
            summary[f"accuracy_{when}"] = known[when]["accuracy"]

        evaluated("before")
        try:
            with stop:
                trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        except Exception:
            trainer.keep()
            raise
        finally:
            summary["steps"] = trainer.state.global_step
            summary["reward_errors"] = {name: dict(reward.errors) for name, reward in rewards.items() if reward.errors}
        if trainer.stop_reason or guard.reason or stop.received:
            reason = trainer.stop_reason or guard.reason or f"{stop.received} after step {summary['steps']}"
            summary |= {"status": "stopped", "reason": reason}
            return
        trainer.save_model(str(run_dir / "model"))
        (run_dir / "model" / "training_args.bin").unlink(missing_ok=True)  # a pickle; `.hydra` says the same in words
        evaluated("after")
        summary["status"] = "completed"


def prepare_vllm(config: DictConfig, problems: Problems, tokenizer: Any, console: Console) -> None:
    """Say that vLLM generates, and see to room for held-out prompts, which may be longer than those to train on."""
    train = config.train
    where = {"colocate": "in this process", "server": f"on {server_url(train)}"}[train.vllm_mode]
    console.print(f"vLLM generates, {where}", highlight=False, soft_wrap=True)
    if problems.held_out is None:
        return
    longest = max(prompt_lengths(list(problems.held_out["prompt"]), tokenizer))
    if train.vllm_mode == "server":
        check_room(config, longest)
    elif train.vllm_max_model_length:
        train.vllm_max_model_length = max(longest + train.max_completion_length, train.vllm_max_model_length)


def make_trainer(config: DictConfig, run_dir: Path, problems: Dataset, rewards: Sequence[Reward]) -> ExactGRPOTrainer:
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
            reward_funcs=[reward.as_function() for reward in rewards],
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
    trainer.keeps_columns = True
    trainer.remove_callback(PrinterCallback)
    policy.keep_differentiable(trainer.model)
    return trainer


def evaluate_policy(
    trainer: ExactGRPOTrainer, held_out: Dataset, judge: Reward, config: DictConfig, file: Path, console: Console
) -> dict[str, Any]:
    """Answer the held-out problems greedily with the policy as it is now."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    length = config.train.max_completion_length
    was_training = model.training
    model.eval()
    file.unlink(missing_ok=True)
    generate: Generate = partial(complete, model, trainer.processing_class, length)
    batch_size = config.train.per_device_eval_batch_size
    if trainer.use_vllm:
        trainer.vllm_generation.sync_weights()
        generate, batch_size = partial(answer, trainer), BATCH
    result = evaluate(
        generate=generate,
        problems=held_out,
        judge=judge,
        decoding=Decoding(length),
        file=file,
        batch_size=batch_size,
        console=console,
        difficulty=config.task.eval.difficulty,
    )
    model.train(was_training)
    return result
