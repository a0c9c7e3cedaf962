"""Computes the steps of a run again: its own trainer, with stored rollouts in the place of sampling."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from grpo.extras.replay.recorder import FOLDER, Recorder
from grpo.generation.backend import Backend
from grpo.trainer import trl
from grpo.trainer.batch import Batch
from grpo.trainer.processes import own_part
from grpo.trainer.rollout.columns import from_tensor, from_tensors
from grpo.trainer.rollout.completion import Completion, Row
from grpo.trainer.rollout.sampling import Sampled, Source
from grpo.trainer.rollout.scoring import score


class NoEngine(Backend):
    """Stands for vLLM where nothing is generated."""


class StoredRollouts(Source):
    """Rollouts of a run that has been recorded.

    Args:
        recorder: names the files.
        folder: `replay/` of the run.
        rescores: whether the completions are scored again; environments are not there to be scored.
    """

    def __init__(self, recorder: "Again", folder: Path, rescores: bool) -> None:
        super().__init__(None)
        self.recorder, self.folder, self.rescores = recorder, folder, rescores
        self.record: dict[str, Any] = {}
        self.rewards: torch.Tensor | None = None
        """Rewards of today, (completions of all processes, rewards)."""

    def sample(self, trainer: Any, rows: list[Row]) -> Sampled:
        """Return the stored completions of a step, with the rewards that they had."""
        file = self.folder / self.recorder.file("rollouts", trainer.state.global_step + 1).name
        self.record = torch.load(file, weights_only=True)
        first = self.folder / file.name.replace(f"{self.recorder.suffix}.pt", "_0.pt") if self.recorder.suffix else file
        stored = torch.load(first, weights_only=True)["completions"] if first != file else self.record["completions"]
        completions = [from_tensors(row) for row in stored]
        columns = {name: from_tensor(values) for name, values in self.record["rows"].items()}
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        if self.rescores:
            local = own_part(trainer.accelerator, completions)
            texts = [[getattr(completion, name) for completion in local] for name in ("prompt", "messages", "ids")]
            self.rewards = score(trainer, rows, *texts)
            masks = [completion.mask for completion in local] if local[0].mask is not None else None
            for stage in trainer.rollouts.stages:
                stage.scored(trainer, texts[2], masks, self.rewards)
            trl.take_columns(trainer)  # the stored completions have those of then
        return completions, rows

    def ahead(self, trainer: Any) -> AbstractContextManager[None]:
        """Return the context of a training."""
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: no checkpoint is written."""
        return {}


def again(trainer: Any, run: str, until: int) -> "Again":
    """Return the callback that computes the steps of a run again, up to `until`."""
    return Again(trainer, Path(run) / FOLDER, until)


class Again(Recorder):
    """Records steps that are computed again, from the stored rollouts of a run."""

    def __init__(self, trainer: Any, stored: Path, until: int) -> None:
        super().__init__(trainer, until)
        self.until = until
        self.rollouts = StoredRollouts(self, stored, rescores=not trainer.environment_factories)
        self.source.source = self.rollouts

    def assemble(self, trainer: Any, completions: Sequence[Completion], batch_of: Callable[[], Batch]) -> Batch:
        """Assemble as recorded, and continue with the random numbers of then."""
        batch = super().assemble(trainer, completions, batch_of)
        state = self.rollouts.record["random"]
        torch.set_rng_state(state["cpu"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
        return batch

    def recorded_rewards(self, completions: Sequence[Completion]) -> list[list[float]]:
        """Return the rewards of today, or those of then if they are not computed."""
        rewards = self.rollouts.rewards
        return super().recorded_rewards(completions) if rewards is None else rewards.tolist()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write down the update; the last one ends the training, without a model and an evaluation."""
        super().on_step_end(args, state, control, **kwargs)
        if state.global_step >= self.until:
            self.trainer.guard.stop_reason = f"step {self.until} is computed"
            control.should_training_stop, control.should_save = True, False
