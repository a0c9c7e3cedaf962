"""Keeps what `grpo.replay` and `grpo.why` need of a run, in `replay/` of the run directory.

`rollouts_00012.pt` has the rollouts that were made for step 12: problems, completions, rewards, the batch that they
became, and the state of the random numbers behind them. `update_00012.pt` has the update of step 12: log-probabilities
of the completions, loss, learning rate, and fingerprints of gradient, weights and optimizer. `steps.jsonl` has a line
per step with a digest of each. Processes write files of their own, as `update_00012_1.pt` of rank 1. `origin.json`
says what computed them: versions, device, threads, configuration, reward functions.

Only files without which the last `keep` steps could not be computed again from a checkpoint are kept.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerState

from grpo.extras.replay.fingerprint import digest, fingerprints
from grpo.extras.replay.origin import ORIGIN, origin_of
from grpo.rundir.files import read_lines, write_json, write_lines
from grpo.rundir.resume import checkpoints
from grpo.trainer.batch import FIELDS, Batch
from grpo.trainer.processes import own_part
from grpo.trainer.resume import own_shard
from grpo.trainer.rollout.columns import as_tensors, to_tensor
from grpo.trainer.rollout.completion import Completion, Row
from grpo.trainer.rollout.sampling import Sampled, Source
from grpo.trainer.rollout.stages import Stage
from grpo.trainer.update.token_values import Watcher
from grpo.utils.atomic import atomic
from grpo.utils.errors import GenerationError

FOLDER = "replay"
STEPS = "steps.jsonl"
NUMBER = re.compile(r"(?:rollouts|update)_(\d+)(?:_(\d+))?\.pt")
"""Step and rank of a file."""


def recorder(trainer: Any, keep: int) -> "Recorder | None":
    """Return the recorder of a trainer; None if nothing is kept."""
    return Recorder(trainer, keep) if keep else None


class RecordedSource(Source):
    """The source of a trainer's rollouts; keeps what it has returned for the recorder."""

    def __init__(self, source: Source) -> None:
        super().__init__(source.stream)
        self.source = source
        self.order: list[Any] = []
        """Problems of this process, as the data loader gave them."""
        self.rows: list[Row] = []
        """Rows of this process's completions."""

    def sample(self, trainer: Any, rows: list[Row]) -> Sampled:
        """Return the completions of a step; a collective call."""
        self.order = [row_digest(row) for row in rows]
        completions, self.rows = self.source.sample(trainer, rows)
        return completions, self.rows

    def has_taken_all(self, args: Any) -> bool:
        """Return whether the problems are over."""
        return self.source.has_taken_all(args)

    def ahead(self, trainer: Any) -> AbstractContextManager[None]:
        """Return the context of a training."""
        return self.source.ahead(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return what the next steps depend on."""
        return self.source.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with what `state_dict` has returned."""
        self.source.load_state_dict(state)


class Recorder(TrainerCallback, Stage, Watcher):
    """Writes `replay/` of a run, and sees its rollouts, micro-batches and steps.

    Args:
        trainer: an `ExactGRPOTrainer`, before its training.
        keep: number of steps that can be computed again.
    """

    def __init__(self, trainer: Any, keep: int) -> None:
        self.trainer, self.keep = trainer, keep
        self.folder = Path(trainer.args.output_dir) / FOLDER
        rank = trainer.accelerator.process_index
        self.suffix = f"_{rank}" if trainer.accelerator.num_processes > 1 else ""
        self.source = trainer.rollouts.source = RecordedSource(trainer.rollouts.source)
        trainer.rollouts.stages = [*trainer.rollouts.stages, self]
        trainer.watchers.append(self)
        self.digests: dict[str, str] = {}
        self.update: dict[str, Any] = {}
        self.scores: list[tuple[torch.Tensor, ...]] = []

    # Rollouts

    def assemble(self, trainer: Any, completions: Sequence[Completion], batch_of: Callable[[], Batch]) -> Batch:
        """Write down the rollouts of a step, and number the completions of the batch."""
        batch = batch_of()
        if not trainer.model.training:
            return batch
        if "completion_id" not in batch:
            numbers = own_part(trainer.accelerator, range(len(completions)))
            batch["completion_id"] = torch.tensor(numbers, device=batch["completion_ids"].device)
        self.keep_rollouts(completions, batch)
        return batch

    def keep_rollouts(self, completions: Sequence[Completion], batch: Batch) -> None:
        """Write down rollouts as they are assembled.

        Raises:
            GenerationError: a tool has returned an image.
        """
        if any(completion.tool_images for completion in completions):
            raise GenerationError("replay.keep: a tool has returned an image, and rollouts with images are not kept")
        tokens = {
            name: value.cpu()
            for name, value in batch.items()
            if isinstance(value, torch.Tensor) and FIELDS[name].of != "images" and name != "completion_id"
        }
        is_first = not self.suffix or self.suffix == "_0"
        record = {
            "order": self.source.order,
            "rows": columns_of(self.source.rows),
            "completions": [as_tensors(completion) for completion in completions] if is_first else [],
            "rewards": self.recorded_rewards(completions),
            "batch": tokens,
            "random": random_state(),
        }
        self.write_file("rollouts", self.trainer.state.global_step + 1, record)
        self.digests |= {
            "problems": digest([[completion.prompt, completion.prompt_ids] for completion in completions]),
            "completions": digest([[completion.ids, completion.mask] for completion in completions]),
            "sampler": digest([completion.logps and list(completion.logps) for completion in completions]),
            "rewards": digest(record["rewards"]),
            "advantages": digest(tokens["advantages"]),
            "batch": digest(tokens),
        }

    def recorded_rewards(self, completions: Sequence[Completion]) -> list[list[float]]:
        """Return the rewards of completions, in the order of the trainer's reward functions."""
        return [completion.rewards for completion in completions]

    # The update

    def note(self, trainer: Any, inputs: Batch, loss: torch.Tensor, logps: torch.Tensor, entropies: Any = None) -> None:
        """Keep loss and log-probabilities of a micro-batch, on their device."""
        weight = trainer.part.weight if trainer.part else 1.0
        mask = inputs["completion_mask"]
        if "completion_id" in inputs:
            self.scores.append((inputs["completion_id"], (logps * mask).float(), mask.sum(1), loss.float() * weight))

    def forget(self) -> None:
        """Drop the micro-batches of a step that begins again."""
        self.scores = []

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Forget what is of steps that are repeated, and write down weights and optimizer as the training begins."""
        step = state.global_step
        for file in self.files():
            if step_of(file) > step:
                file.unlink()
        lines = self.folder / self.named(STEPS)
        if lines.exists():
            write_lines(lines, [line for line in read_lines(lines) if line["step"] <= step])
        if state.is_world_process_zero:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.remove_of_others()
            write_json(self.folder / ORIGIN, origin_of(self.trainer))
        if not self.file("update", step).exists():
            self.write_file("update", step, self.state_of(kwargs["model"], kwargs["optimizer"]))

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Keep fingerprints of the gradient, clipped, and the learning rate."""
        offloaded = self.trainer.step_update.offloaded
        places = offloaded.memory if offloaded else {}
        gradients = fingerprints(
            (name, own_shard(places.get(weight, weight.grad)))
            for name, weight in trained(kwargs["model"])
            if weight in places or weight.grad is not None
        )
        rates = [group["lr"] for group in kwargs["optimizer"].param_groups]
        self.update = {"gradient": gradients, "learning_rate": list(map(float, dict.fromkeys(rates)))}

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Write down the update of a step, and remove what is too old."""
        size = self.trainer.args.generation_batch_size
        log_probs, loss = {}, 0.0
        for numbers, logps, lengths, part in self.scores:
            loss += part.item()
            for number, values, length in zip(numbers.tolist(), logps.cpu(), lengths.tolist(), strict=True):
                log_probs[number % size] = values[:length].clone()
        record = {"log_probs": dict(sorted(log_probs.items())), "loss": loss, **self.update}
        record |= self.state_of(kwargs["model"], kwargs["optimizer"])
        self.write_file("update", state.global_step, record)
        line = {"step": state.global_step, **self.digests, **{name: digest(value) for name, value in record.items()}}
        with (self.folder / self.named(STEPS)).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.scores, self.update, self.digests = [], {}, {}
        self.remove_old(state.global_step)

    def state_of(self, model: Any, optimizer: Any) -> dict[str, Any]:
        """Return fingerprints of the trained weights and of the optimizer's state, of this process's shards."""
        names = {weight: name for name, weight in trained(model)}
        states = getattr(optimizer, "state", {})
        moments = (
            (f"{names[weight]} {key}", own_shard(value))
            for weight, values in states.items()
            if weight in names
            for key, value in values.items()
            if isinstance(value, torch.Tensor)
        )
        weights = ((name, own_shard(weight)) for name, weight in trained(model))
        return {"weights": fingerprints(weights), "optimizer": fingerprints(moments)}

    # Files

    def remove_old(self, step: int) -> None:
        """Remove files of steps before the checkpoint from which the last `keep` steps are computed again."""
        saved = [int(path.name[11:]) for path in checkpoints(self.folder.parent)]
        first = max((number for number in saved if number <= step - self.keep), default=0)
        for file in self.files():
            if step_of(file) < first or (step_of(file) == first and file.name.startswith("rollouts")):
                file.unlink()

    def remove_of_others(self) -> None:
        """Remove the files of a start with another number of processes: their parts do not fit together."""
        ranks = {str(rank) for rank in range(self.trainer.accelerator.num_processes)} if self.suffix else {None}
        for file in list(self.folder.glob("*.pt")):
            if (match := NUMBER.fullmatch(file.name)) and match[2] not in ranks:
                file.unlink()

    def files(self) -> Iterator[Path]:
        """Return this process's files."""
        for kind in ("rollouts", "update"):
            yield from list(self.folder.glob(f"{kind}_{'[0-9]' * 5}{self.suffix}.pt"))

    def file(self, kind: str, step: int) -> Path:
        """Return this process's file of a step."""
        return self.folder / f"{kind}_{step:05d}{self.suffix}.pt"

    def named(self, name: str) -> str:
        """Return the name of this process's file."""
        stem, dot, kind = name.partition(".")
        return f"{stem}{self.suffix}{dot}{kind}"

    def write_file(self, kind: str, step: int, record: dict[str, Any]) -> None:
        """Write a file as `torch.load` takes it with `weights_only`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        plain = {
            name: {key: tuple(mark) for key, mark in value.items()}
            if name in ("gradient", "weights", "optimizer")
            else value
            for name, value in record.items()
        }
        with atomic(self.file(kind, step)) as partial:
            torch.save(plain, partial)


def step_of(file: Path) -> int:
    """Return the step of a file in `replay/`."""
    match = NUMBER.fullmatch(file.name)
    assert match, file
    return int(match[1])


def trained(model: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Return the weights that are trained, with their names."""
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            yield name.removeprefix("module."), weight


def columns_of(rows: list[Row]) -> dict[str, torch.Tensor]:
    """Return the columns of rows as tensors; values that Arrow cannot have in a column are None."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: to_tensor([row.get(name) for row in rows]) for name in names}


def row_digest(row: Row) -> str:
    """Return the digest of the columns of a row that are numbers or text, with lists and dictionaries of these."""
    return digest({name: value for name, value in row.items() if is_plain(value)})


def is_plain(value: Any) -> bool:
    """Return whether a value is a number or a text, or lists and dictionaries of these."""
    if isinstance(value, list):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(map(is_plain, value.values()))
    return isinstance(value, str | int | float | None)


def random_state() -> dict[str, torch.Tensor]:
    """Return the state of the random numbers of CPU and GPU."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states
