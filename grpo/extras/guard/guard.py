"""Watches the held-out accuracy of a run; after a fall the run goes back to its best checkpoint.

Every `every` steps it looks: the policy answers a fixed sample of the held-out problems greedily. The look with the
most correct answers is the best, and its checkpoint is saved. `guard.jsonl` has a line per look, and is all that a
resumed run needs; `guard/` has the answers. At the end the best checkpoint is loaded and becomes the model.
"""

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState

from grpo.evaluation.by_task import file_of
from grpo.evaluation.in_training import evaluate_policy
from grpo.evaluation.loop import Evaluation
from grpo.extras.guard.rollback import roll_back
from grpo.extras.guard.significance import changed, largest_rise, level, p_of_fall
from grpo.rundir.files import read_lines, write_lines
from grpo.trainer import trl
from grpo.utils.distributed import gathered, is_main_process
from grpo.utils.manifest import is_sealed
from grpo.utils.terminal import plain_console, say

log = logging.getLogger(__name__)
FILE = "guard.jsonl"
COSTLY = 0.05
"""Fraction of the time of a training above which a warning names a larger `guard.every`."""
Look = dict[str, Any]
"""A line of `guard.jsonl`: `step`, `accuracy`, `answers` (`1` correct, `0` incorrect), `event`, `reason`, `seconds`."""


def guarded(trainer: Any, evaluations: Mapping[str, Evaluation], **options: Any) -> "Guard":
    """Return the guard of a trainer, which looks at a sample of the held-out problems of `evaluations`."""
    return Guard(trainer, sampled(evaluations, options.pop("samples")), **options)


def sampled(evaluations: Mapping[str, Evaluation], samples: int) -> dict[str, Evaluation]:
    """Return evaluations of about so many problems, evenly spaced over those of all tasks, without a progress bar."""
    total, looks = sum(len(evaluation.problems) for evaluation in evaluations.values()), {}
    for name, evaluation in evaluations.items():
        held_out = len(evaluation.problems)
        size = max(1, round(held_out * min(1, samples / total)))
        problems = evaluation.problems.select([held_out * row // size for row in range(size)])
        looks[name] = replace(evaluation, problems=problems, console=plain_console(quiet=True), difficulty=None)
    return looks


class Guard(TrainerCallback):
    """Looks at the policy, saves the best, goes back to it after a fall, and ends a run on a plateau.

    Args:
        trainer: an `ExactGRPOTrainer`.
        evaluations: of a look, by task.
        every: steps between two looks.
        rollbacks: how often the run goes back; one more fall ends it.
        error: probability of a rollback where accuracy never falls.
        plateau: number of looks within which accuracy rises by at least `rise`, or the run ends; None for no end.
        rise: a fraction of accuracy.
    """

    def __init__(
        self,
        trainer: Any,
        evaluations: Mapping[str, Evaluation],
        every: int,
        rollbacks: int,
        error: float,
        plateau: int | None,
        rise: float,
    ) -> None:
        self.trainer, self.evaluations, self.every = trainer, evaluations, every
        self.rollbacks, self.error, self.plateau, self.rise = rollbacks, error, plateau, rise
        self.folder = Path(trainer.args.output_dir)
        self.looks: list[Look] = []
        self.started = time.monotonic()
        self.seconds = 0.0
        """Time of this start that the guard has taken."""
        self.saving: float | None = None
        """When a checkpoint was asked for that would not have been saved without the guard."""

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Continue with the looks up to this step; without any, look now."""
        self.started = time.monotonic()
        file = self.folder / FILE
        if not file.exists() and state.best_model_checkpoint:  # continues the run of another directory
            file = Path(state.best_model_checkpoint).parent / FILE
        self.looks = [look for look in read_lines(file) if look["step"] <= state.global_step]
        gathered([])  # all have read it
        if is_main_process():
            write_lines(self.folder / FILE, self.looks)
        if not self.looks:
            self.look(state, control)
            if not is_sealed(self.folder / f"checkpoint-{state.global_step}"):
                trl.save_checkpoint(self.trainer)
            self.on_save(args, state, control)
            control.should_save = False

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Look at every `every`-th step, and at the last."""
        if state.global_step % self.every == 0 or state.global_step >= state.max_steps:
            self.look(state, control)

    def on_save(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Count the time of a checkpoint of the guard's."""
        if self.saving:
            self.seconds, self.saving = self.seconds + time.monotonic() - self.saving, None

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Load the best checkpoint, and report."""
        best = self.best(state)
        if best and best["step"] != state.global_step:
            trl.load_weights(self.trainer, str(state.best_model_checkpoint))
            self.report(f"the model is that of step {best['step']}, with accuracy {best['accuracy']:.1%}")
        if (cost := self.summary["guard"]["time"]) > COSTLY:
            every = -int(-self.every * cost // COSTLY)
            self.report(f"it took {cost:.0%} of the time of the training; guard.every={every} takes 5 %")

    # A look

    def look(self, state: TrainerState, control: TrainerControl) -> None:
        """Look at the policy, and act on its accuracy."""
        began, saves = time.monotonic(), control.should_save
        answers, fails = self.answers(state.global_step)
        look: Look = {"step": state.global_step, "accuracy": answers.count("1") / len(answers), "answers": answers}
        event, reason = ("skipped", "the grader failed") if fails else self.decide(look, self.best(state))
        self.looks.append(look | {"event": event, "reason": reason})
        if event == "best":
            state.best_metric, state.best_global_step = look["accuracy"], state.global_step
            state.best_model_checkpoint = str(self.folder / f"checkpoint-{state.global_step}")
            control.should_save = True
        elif event == "rollback":
            roll_back(self.trainer, Path(str(state.best_model_checkpoint)))
            control.should_save = True  # the steps since the last checkpoint do not lead here
        elif event in ("fall", "plateau"):
            control.should_training_stop = control.should_save = True
        self.trainer.note({"guard/accuracy": look["accuracy"]})
        now = time.monotonic()
        self.saving = now if control.should_save and not saves else None
        self.seconds += now - began
        self.looks[-1]["seconds"] = round(now - began, 3)
        if reason:
            self.report(f"step {state.global_step}: {reason}")
        if is_main_process():
            with (self.folder / FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps(self.looks[-1]) + "\n")

    def answers(self, step: int) -> tuple[str, bool]:
        """Return whether each answer of the policy is correct, and whether the grader failed on any; a collective call.

        Nothing that training depends on changes: greedy decoding draws no random numbers, and those that an
        environment or an engine draws are put back.
        """
        rows: list[dict[str, Any]] = []
        fails = False
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices):
            for name, evaluation in self.evaluations.items():
                file = file_of(self.folder / "guard" / f"step_{step:05d}.jsonl", name)
                file.parent.mkdir(exist_ok=True)
                result = evaluate_policy(self.trainer, replace(evaluation, file=file))
                fails |= "grader_errors" in result
                if is_main_process():  # in the order of the problems, whoever has answered them
                    rows += sorted(read_lines(file), key=lambda row: row["problem"])
        self.trainer.rollouts.discard()
        return "".join(gathered(["1" if row["correct"] else "0" for row in rows])), fails

    def best(self, state: TrainerState) -> Look | None:
        """Return the best look whose checkpoint is there."""
        best = [look for look in self.looks if look["event"] == "best"]
        return best[-1] if best and state.best_model_checkpoint else None

    def decide(self, look: Look, best: Look | None) -> tuple[str | None, str | None]:
        """Return what follows from a look, and why: `best`, `rollback`, `fall` (the end), `plateau` (the end) or None.

        Args:
            best: the best look before it.
        """
        is_last = look["step"] >= self.trainer.state.max_steps
        if best is None or (look["accuracy"], is_last) > (best["accuracy"], False):  # of equal ones the last step's
            return "best", None
        gained, lost = changed(best["answers"], look["answers"])
        if p_of_fall(best["answers"], look["answers"]) <= level(self.error, self.planned):
            fell = f"accuracy fell from {best['accuracy']:.1%} at step {best['step']} to {look['accuracy']:.1%}: "
            fell += f"{lost} answers have become incorrect and {gained} correct; "
            used = sum(each["event"] == "rollback" for each in self.looks)
            if used < self.rollbacks and not is_last:
                return "rollback", f"{fell}back to checkpoint-{best['step']}, with half the learning rate"
            return "fall", f"{fell}the training ends, after {used} of guard.rollbacks={self.rollbacks}"
        since = max((each["step"] for each in self.looks if each["event"] == "rollback"), default=-1)
        window = [each for each in self.looks if each["step"] > since and each["event"] != "skipped"] + [look]
        if self.plateau and len(window) > self.plateau:
            bound = largest_rise(window[-1 - self.plateau]["answers"], look["answers"])
            if bound < self.rise:
                rose = f"accuracy rose by less than {bound:.1%} in {self.plateau} looks, with 90 % confidence"
                return "plateau", f"{rose}; the training ends"
        return None, None

    @property
    def planned(self) -> int:
        """Number of looks of the whole run, with the one before its first step."""
        return 1 + -(-self.trainer.state.max_steps // self.every)

    @property
    def summary(self) -> dict[str, Any]:
        """Facts for `summary.json`."""
        best = self.best(self.trainer.state) or {"step": None, "accuracy": None}
        events = [{key: look[key] for key in ("step", "event", "reason")} for look in self.looks if look["reason"]]
        part = self.seconds / max(time.monotonic() - self.started, 1e-9)
        facts = {"looks": len(self.looks), "best_step": best["step"], "best_accuracy": best["accuracy"]}
        return {"guard": facts | {"events": events, "seconds": round(self.seconds, 1), "time": round(part, 4)}}

    def report(self, text: str) -> None:
        """Write a line into the log and on the terminal."""
        log.warning("guard: %s", text)
        if is_main_process():
            say(f"guard: {text}")
