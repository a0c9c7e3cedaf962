"""The evaluations of a run, before and after its training."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from grpo.config.batch import evaluated_at_once
from grpo.config.mixture import limit_of, single_tasks
from grpo.config.resolve import Resolved
from grpo.data.rewards import check_grader
from grpo.data.task import Problems
from grpo.evaluation.by_task import file_of, held_out_of, in_total, join_files
from grpo.evaluation.in_training import evaluate_policy
from grpo.evaluation.loop import Decoding, Evaluation
from grpo.run.callbacks import StopOnSignal, WhenSharded
from grpo.rundir.files import read_json, write_json
from grpo.trainer import ExactGRPOTrainer
from grpo.utils.distributed import is_main_process
from rewards.isolation.reward import Reward


def evaluations_of(
    settings: Resolved, problems: Problems, rewards: dict[str, Reward], run_dir: Path, console: Console
) -> dict[str, Evaluation]:
    """Return how the policy is evaluated before and after training, by task; nothing without held-out problems."""
    if problems.held_out is None:
        return {}
    return {
        name: Evaluation(
            held_out_of(problems, name),
            rewards[task.eval.reward],
            Decoding(limit_of(name, settings.task, settings.train)),
            file=file_of(run_dir / "evaluation.jsonl", name),
            batch_size=evaluated_at_once(settings.train, settings.processes),
            console=console,
            difficulty=task.eval.difficulty,
        )
        for name, task in single_tasks(settings.task).items()
        if task.eval.size
    }


def evaluated(
    when: str, trainer: ExactGRPOTrainer, evaluations: dict[str, Evaluation], run_dir: Path
) -> dict[str, float]:
    """Evaluate the policy `before` or `after` training, unless that has been done, and return its accuracy."""
    if not evaluations:
        return {}
    file, answers = run_dir / "evaluation.json", run_dir / f"evaluation_{when}.jsonl"
    known = read_json(file)
    if when == "after" or when not in known:
        for evaluation in evaluations.values():
            check_grader(evaluation.grader)
        known[when] = in_total(
            {
                name: evaluate_policy(trainer, replace(evaluation, file=file_of(answers, name)))
                for name, evaluation in evaluations.items()
            }
        )
        if is_main_process():
            if "" not in evaluations:
                join_files(answers, list(evaluations))
            write_json(file, known)
    return {f"accuracy_{when}": known[when]["accuracy"]}


def evaluate_first(
    trainer: ExactGRPOTrainer,
    evaluate: Callable[[], None],
    stop: StopOnSignal,
    checkpoint: Path | None,
    run_dir: Path,
) -> None:
    """Evaluate before training: now, or once it has sharded the policy.

    The weights of a checkpoint come later: a run that resumes has the accuracy before it from its beginning, or none.
    """
    if checkpoint and "before" not in read_json(run_dir / "evaluation.json"):
        return
    if trainer.sharded:
        trainer.add_callback(WhenSharded(stop, evaluate))
    else:
        stop.begin("evaluating before the training")
        evaluate()
