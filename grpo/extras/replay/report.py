"""The result of a replay, as data and as text."""

import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from grpo.extras.replay.compare import STAGES, TOLERANCE, Difference, Records, differences, start_differences
from grpo.extras.replay.computing import Stored, compute_again, stored_steps
from grpo.extras.replay.origin import differences as changes
from grpo.extras.replay.origin import read_origin, rounds_otherwise
from grpo.extras.replay.recorder import FOLDER
from grpo.extras.replay.rescored import effect
from grpo.rundir.files import read_lines
from grpo.rundir.lock import is_running
from grpo.utils.errors import ConfigError
from rewards.text import printable

OURS = (
    *("train.resume_from_checkpoint", "train.save_strategy", "train.report_to", "train.max_steps", "train.push_to_hub"),
    *("train.vllm_", "callbacks.", "guard.", "plan."),
    *("engine.staleness", "engine.share_weights", "engine.backend", "engine.lora", "engine.drafts"),
)
"""Keys that a replay changes itself."""


def repeated(
    run: Path,
    step: int | None = None,
    overrides: Sequence[str] = (),
    waiting: Callable[[str], AbstractContextManager] = nullcontext,
) -> dict[str, Any]:
    """Compute a step of a run again and return what differs, see `result_of`.

    Args:
        step: None for the last.
        overrides: options of the run's rewards.
        waiting: returns a context that says while it computes what takes so long.

    Raises:
        ConfigError: the run has not kept what this needs, or is running.
        RunError: the step could not be computed.
    """
    stored = stored_steps(run)
    if is_running(run):
        raise ConfigError(f"{run}: the run is running; a step is computed again once it has ended")
    step = step if step is not None else stored.steps[-1]
    start, again = stored.start_of(step), run.resolve() / FOLDER / "again"
    shutil.rmtree(again, ignore_errors=True)
    with waiting(f"computing {f'step {step}' if step == start + 1 else f'steps {start + 1} to {step}'} again"):
        compute_again(stored, start, step, again, overrides)
    result = result_of(stored, again, start, step)
    shutil.rmtree(again)  # which a failure leaves, with its log
    return result


def result_of(stored: Stored, again: Path, start: int, step: int) -> dict[str, Any]:
    """Return what a replay has found, as `--json` prints it.

    Args:
        stored: of the run.
        again: directory of the repetition.
        start: step of the checkpoint, or 0.
        step: the step that was asked for.
    """
    origin, now = (read_origin(folder / FOLDER) for folder in (stored.run, again))
    config = origin["config"]
    rewards = list(config["reward"])
    tolerance = tolerance_of(config) if rounds_otherwise(origin, now) else 0.0
    before, today = Records(stored.run / FOLDER, rewards), Records(again / FOLDER, rewards)
    looks = read_lines(stored.run / "guard.jsonl")
    went_back = any(look["step"] == start and look["event"] == "rollback" for look in looks)
    # the record of a step has the weights that the guard has left there, and the checkpoint those that it went back to
    first: list[Difference] = [] if went_back else start_differences(before, today, start)
    for number in range(start + 1, step + 1):
        first += differences(before, today, number, tolerance, order=bool(start))
    explains = [line for line in changes(origin, now) if not line.startswith(OURS) and not is_eval(line, start)]
    size = config["train"]["num_generations"]
    weights = [float(reward.get("weight", 1.0)) for reward in config["reward"].values()]
    both = [records.read("rollouts", step) for records in (before, today)]
    rescored = effect(both[0][0]["rewards"], both[1][0]["rewards"], rewards, weights, size) if all(both) else None
    summary = summary_of(first, start, step)
    errors = [row for file in sorted(again.glob("reward_errors*.jsonl")) for row in read_lines(file)]
    return {
        "run": str(stored.run),
        "step": step,
        "from": start,
        "summary": summary,
        "compared": [*stages_kept(both[0])],
        "equal": not first,
        "within_rounding": all(difference.rounding for difference in first),
        "tolerance": tolerance,
        "differences": [asdict(difference) for difference in first],
        "explains": explains,
        "rewards": rescored,
        "reward_errors": [f"reward.{row['reward']}: {row['message']}" for row in errors],
    }


def stages_kept(rollouts: list[Any]) -> list[str]:
    """Return the stages that a step has: the rollouts of an earlier step may be its own."""
    of_rollouts = ("problems", "completions", "rewards", "advantages", "old log-probabilities")
    return [stage for stage in STAGES if rollouts or stage not in of_rollouts]


def summary_of(differ: Sequence[Difference], start: int, step: int) -> str:
    """Return the result in a line."""
    origin = f"checkpoint-{start}" if start else "the beginning of the run"
    if not differ:
        return f"equal, bit for bit, in all steps from {origin} to step {step}"
    first = next((difference for difference in differ if not difference.rounding), differ[0])
    kind = "the first rounding difference" if first.rounding else "the first difference"
    place = f"{first.where}: " if first.where else ""
    return f"{kind} since {origin}: step {first.step}, {STAGES[first.stage]}: {place}{first.text}"


def is_eval(line: str, start: int) -> bool:
    """Return whether a change is the evaluation that a replay from the beginning does not need."""
    return not start and "task.eval.size: " in line


def tolerance_of(config: dict[str, Any]) -> float:
    """Return the difference that the rounding of a run's numbers explains."""
    train = config["train"]
    low = "bfloat16" if train.get("bf16") else "float16" if train.get("fp16") else str(config["model"]["dtype"])
    return TOLERANCE.get(low, TOLERANCE["bfloat16"])


def show(result: dict[str, Any], console: Console, rescores: bool) -> None:
    """Print a replay: a table of the step's stages, the first difference, and what may explain it.

    Args:
        rescores: whether the options of a reward were changed, so that differences are wanted.
    """
    step, differ = result["step"], result["differences"]
    by_stage = {item["stage"]: item for item in reversed(differ) if item["step"] == step or item["stage"] == "start"}
    table = Table("stage", f"step {step}, computed again")
    for stage, name in STAGES.items():
        if item := by_stage.get(stage):
            place = f"{item['where']}: " if item["where"] else ""
            table.add_row(name, f"{'rounding' if item['rounding'] else 'differs'}: {place}{item['text']}")
        else:
            table.add_row(name, "equal" if stage in result["compared"] else "rollouts of an earlier step")
    console.print(table)
    console.print(result["summary"], soft_wrap=True)
    if "rewards" in by_stage:
        console.print("the stages after the rewards are computed from the rewards of the run", soft_wrap=True)
    if not rescores:
        explain(result, console)
    if result["rewards"] and (rescores or "rewards" in by_stage):
        show_rewards(result["rewards"], result["reward_errors"], console)


def explain(result: dict[str, Any], console: Console) -> None:
    """Print what has changed since the run, and may explain a difference."""
    for line in result["explains"]:
        text = "changed since, without effect on these steps" if result["equal"] else "may explain it"
        console.print(f"{text}: {line}", soft_wrap=True)
    if not (result["equal"] or result["explains"]):
        text = (
            "versions, device, threads, configuration and reward functions are those of the run: a reward or a kernel "
            "that does not repeat itself, or a file that was changed"
        )
        console.print(text, soft_wrap=True)


def show_rewards(rewards: dict[str, Any], errors: Sequence[str], console: Console) -> None:
    """Print what the rewards of today would have changed, and the first error of each kind."""
    table = Table("reward", "mean in the run", "mean now", f"changed of {rewards['completions']}", "failed now")
    for name, reward in rewards["rewards"].items():
        means = [f"{reward[key]:.4g}" for key in ("mean", "mean_now")]
        table.add_row(name, *means, f"{reward['changed']}", f"{reward['failed']}")
    console.print(table)
    for line in errors:
        console.print(printable(line), soft_wrap=True)
    groups = f"zero-variance groups: {rewards['zero_variance']} of {rewards['groups']} in the run, "
    signs = f"{rewards['zero_variance_now']} now; advantages that become positive, zero or negative instead: "
    console.print(f"{groups}{signs}{rewards['signs']}", soft_wrap=True)


def verdict(differ: Sequence[dict[str, Any]]) -> int:
    """Return the exit status: 1 if there is a difference that is no rounding."""
    return int(any(not item["rounding"] for item in differ))
