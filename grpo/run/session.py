"""One run, top to bottom: prepare, evaluate, train, evaluate, write."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console
from transformers import TrainerCallback

from grpo.cli import output_in
from grpo.config.batch import completions
from grpo.config.facts import generator_of
from grpo.config.mixture import single_tasks
from grpo.config.resolve import Resolved
from grpo.config.secrets import without_secrets
from grpo.data.images import is_unused
from grpo.data.limits import check_limits
from grpo.data.mixture import load_problems
from grpo.data.rewards import (
    counts,
    errors_of,
    errors_of_all,
    grader_of,
    reward_options,
    running_rewards,
    usable_columns,
    useless,
)
from grpo.data.task import Problems, reward_columns
from grpo.evaluation.loop import Evaluation
from grpo.generation.backend import backend_class
from grpo.generation.vllm.start import EngineStart
from grpo.model import policy
from grpo.model.adapted import config_of
from grpo.model.thinking import template_of
from grpo.planning.fit import Plan
from grpo.run.callbacks import (
    DiskGuard,
    HostMemoryGuard,
    MetricsFile,
    MismatchWarning,
    SetAside,
    StopOnSignal,
    configured,
)
from grpo.run.checkpoint import checkpoint_for, continued
from grpo.run.evaluations import evaluate_first, evaluated, evaluations_of
from grpo.run.live_page import LivePage
from grpo.run.monitor import Monitor
from grpo.run.outcome import Outcome, ends_when_stuck
from grpo.run.progress import ProgressBar
from grpo.run.trainer import make_trainer
from grpo.rundir.files import ERRORS_FILE, RESOLVED_CONFIG, write_json
from grpo.rundir.history import has_been_run, name_of
from grpo.rundir.summary import report
from grpo.tools.running import Tools, running_tools
from grpo.trainer import ExactGRPOTrainer
from grpo.trainer.measurements import MemoryReadings
from grpo.trainer.resume import keep_steps, save_model
from grpo.utils.atomic import atomic
from grpo.utils.device import kind_of_device
from grpo.utils.distributed import is_main_process, log_name, own_name
from grpo.utils.errors import DirectoryLost
from grpo.utils.hardware import gpu_utilization
from grpo.utils.terminal import plain_console
from rewards.isolation.reward import Reward, RewardError

NEW_TASK = (
    "the first run of this task here: `python -m grpo.preflight` with the same arguments forecasts in minutes whether "
    "it will learn"
)


def run(settings: Resolved, run_dir: Path, plan: Plan | None = None) -> dict[str, Any]:
    """Train as configured, fill the run directory, and return the content of `summary.json`.

    Args:
        plan: prediction for the run; kept beside it and compared with the readings.

    Raises:
        ConfigError: the input was wrong; nothing has been trained.
        RunError: the run broke; the log has the traceback.
    """
    console = plain_console(file=sys.stderr, quiet=not is_main_process())
    memory = MemoryReadings(on_gpu=kind_of_device() != "cpu" and not settings.train.use_cpu)
    is_new, page = not has_been_run(name_of(settings.task), run_dir), LivePage(run_dir)
    with ends_when_stuck(run_dir, page), StopOnSignal() as stop, Outcome(run_dir, plan, memory, page) as outcome:
        outcome.begin()
        find_model(settings)
        checkpoint = checkpoint_for(settings, run_dir, console)
        with output_in(run_dir / log_name()), OnConsole(console), running_tools(settings.task, run_dir) as tools:
            processing_class = policy.load_processing_class(settings.model, template=template_of(settings.config))
            problems = problems_of(settings, processing_class, tools, console)
            write_decisions(settings, plan, run_dir)
            if is_new:
                console.print(NEW_TASK, soft_wrap=True)
            outcome.add(task=name_of(settings.task), data=problems.counts, accuracy_before=None, accuracy_after=None)
            outcome.add(completions_a_step=completions(settings.train, None), continues=continued(checkpoint, run_dir))
            options = options_of_rewards(settings, problems)
            columns = usable_columns(settings.task, options, reward_columns(problems.train), problems.columns)
            with running_rewards(options, columns, run_dir, run_dir / own_name(ERRORS_FILE)) as rewards:
                with EngineStart(console) if generator_of(settings.train) == "colocated" else nullcontext():
                    trainer = make_trainer(settings, run_dir, problems, processing_class, rewards, tools, memory)
                evaluations = evaluations_of(settings, problems, rewards, run_dir, console)
                accuracy = f"rewards/{settings.task.eval.reward}/mean"
                progress = ProgressBar(console, accuracy, list(rewards.values()), settings.plan.host_gb)

                def evaluate(when: str) -> None:
                    outcome.add(**evaluated(when, trainer, evaluations, run_dir))

                utilization = gpu_utilization if memory.on_gpu else None
                with (
                    steps_kept(trainer, rewards, stop, outcome),
                    Monitor(memory, utilization, run_dir, console) as monitor,
                    progress,
                ):
                    evaluate_first(trainer, lambda: evaluate("before"), stop, checkpoint, run_dir)
                    trainer.add_callback(monitor)  # before the file of metrics, as it adds to them
                    guard = add_callbacks(trainer, settings, run_dir, console, stop, evaluations)
                    for callback in (progress, page):
                        trainer.add_callback(callback)
                    outcome.add(**train(trainer, checkpoint, rewards, stop, guard))
                    if outcome.summary["status"] == "completed":
                        stop.begin("saving the model")
                        save_model(trainer, run_dir / "model")
                        stop.begin("evaluating after the training")
                        evaluate("after")
                    outcome.add(reward_errors=errors_of_all(rewards))
    if is_main_process():
        report(outcome.summary, run_dir)
    return outcome.summary


@contextmanager
def steps_kept(
    trainer: ExactGRPOTrainer, rewards: dict[str, Reward], stop: StopOnSignal, outcome: Outcome
) -> Iterator[None]:
    """Keep the steps so far where an exception ends the run, and add to its outcome how far it came."""
    try:
        yield
    except KeyboardInterrupt:
        if stop.activity:  # with all steps done, or none
            keep_steps(trainer)
        raise
    except DirectoryLost:
        raise
    except (Exception, SystemExit):
        keep_steps(trainer)
        raise
    finally:
        outcome.add(steps=trainer.state.global_step, **facts_of(trainer.callback_handler.callbacks))
        outcome.summary.setdefault("reward_errors", errors_of(rewards))


def facts_of(callbacks: list[TrainerCallback]) -> dict[str, Any]:
    """Return the facts for `summary.json` that callbacks have in a dictionary `summary`."""
    summaries = [getattr(callback, "summary", None) for callback in callbacks]
    return {name: fact for summary in summaries if isinstance(summary, dict) for name, fact in summary.items()}


class OnConsole(logging.Handler):
    """While inside, prints what a model cannot share, compile or adapt, as the log has it."""

    LOGGERS = (
        *("grpo.model.policy", "grpo.trainer.exact", "grpo.trainer.compiled_layers"),
        "grpo.trainer.shared_prompts.trial",
    )

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self.console = console

    def __enter__(self) -> None:
        for name in self.LOGGERS:
            logging.getLogger(name).addHandler(self)

    def __exit__(self, *error: object) -> None:
        for name in self.LOGGERS:
            logging.getLogger(name).removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Print a warning above the progress."""
        self.console.print(record.getMessage(), soft_wrap=True)


def find_model(settings: Resolved) -> None:
    """Have the model on this machine, once the engine that generates is known to be there.

    Raises:
        ConfigError: one of them is not.
    """
    if settings.train.use_vllm:
        backend_class(settings.engine.backend).check(settings)
    policy.download(settings.model.model_name_or_path, settings.model.model_revision)


def problems_of(settings: Resolved, processing_class: Any, tools: Tools, console: Console) -> Problems:
    """Load the problems, and say what there is, what the policy may call, and who generates.

    Raises:
        ConfigError: the data cannot be loaded.
    """
    if is_unused(settings.task, settings.model, settings.peft, processing_class):
        console.print(
            "the vision tower is frozen: task.images is not set, so that no image reaches it",
            soft_wrap=True,
        )
    functions = tools.described()
    seed = settings.train.seed if settings.train.shuffle_dataset else None
    problems = load_problems(settings.task, processing_class, tools.described, seed)
    console.print(str(problems), soft_wrap=True)
    model, limit = settings.model, settings.task.max_prompt_length if problems.stream or problems.view else None
    splits = [split for split in (problems.train, problems.held_out) if split]
    completion = settings.train.max_completion_length
    known = config_of(model.model_name_or_path, model.model_revision)
    if warning := check_limits(known, processing_class, splits, completion, limit):
        console.print(warning, soft_wrap=True)
    if names := ", ".join(tool.__name__ for tool in functions):
        console.print(f"the policy may call {names}", soft_wrap=True)
    if settings.train.use_vllm:
        described = backend_class(settings.engine.backend).described(settings)
        console.print(described, soft_wrap=True)
    return problems


def write_decisions(settings: Resolved, plan: Plan | None, run_dir: Path) -> None:
    """Write the configuration that is run, and the plan; one process does."""
    if not is_main_process():
        return
    with atomic(run_dir / RESOLVED_CONFIG) as partial:
        OmegaConf.save(without_secrets(settings.config), partial)
    if plan:
        write_json(run_dir / "plan.json", plan.as_dict())


def options_of_rewards(settings: Resolved, problems: Problems) -> dict[str, dict[str, Any]]:
    """Return the options of the rewards to train by and, if problems are held out, of their grader."""
    options, rewards = reward_options(settings.reward), settings.reward
    for single in single_tasks(settings.task).values() if problems.held_out else ():
        options |= grader_of(single.eval.reward, rewards, settings.train)
    return options


def add_callbacks(
    trainer: ExactGRPOTrainer,
    settings: Resolved,
    run_dir: Path,
    console: Console,
    stop: StopOnSignal,
    evaluations: dict[str, Evaluation],
) -> HostMemoryGuard:
    """Have the steps logged and watched; return the callback that may end the training for want of memory."""
    guard = HostMemoryGuard(settings.plan.host_gb)
    mismatch, disk = MismatchWarning(console, settings.train), DiskGuard(run_dir, console)
    obsolete, metrics = SetAside(run_dir, console), MetricsFile(run_dir / "metrics.jsonl")
    added = configured(settings.config.callbacks, trainer=trainer, evaluations=evaluations)
    for callback in (obsolete, metrics, stop, guard, mismatch, disk, *added):
        trainer.add_callback(callback)
    return guard


def train(
    trainer: ExactGRPOTrainer,
    checkpoint: Path | None,
    rewards: dict[str, Reward],
    stop: StopOnSignal,
    guard: HostMemoryGuard,
) -> dict[str, Any]:
    """Train, from `checkpoint` if there is one, and return `status` and `reason`: completed, or stopped and why.

    Raises:
        RewardError: a reward has failed on every completion, so that nothing has been learned by it.
    """
    before = counts(rewards)
    stop.begin(None)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    reason = trainer.stop_reason or guard.reason
    if stop.received and not reason:
        reason = f"{stop.received} after step {trainer.state.global_step}"
    if (problem := useless(rewards, before)) and not reason:
        raise RewardError(problem)
    return {"status": "stopped" if reason else "completed", "reason": reason}
