"""Compares recorded steps, stage by stage in the order in which a step computes them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from grpo.extras.replay.fingerprint import Fingerprint
from grpo.utils.errors import ConfigError

TOLERANCE = {"float32": 1e-4, "float16": 3e-2, "bfloat16": 3e-2}
"""Largest difference that rounding of a data type explains: of log-probabilities in nats, of others relative to their
norm. Other kernels, devices or numbers of threads add up in another order."""
STAGES = {
    "start": "weights and optimizer before",
    "problems": "problems",
    "completions": "completions as a batch",
    "rewards": "rewards",
    "advantages": "advantages",
    "old log-probabilities": "log-probabilities before the update",
    "log-probabilities": "log-probabilities in the update",
    "loss": "loss",
    "gradient": "gradient",
    "learning rate": "learning rate",
    "weights": "weights after",
    "optimizer": "optimizer after",
}
"""Stages of a step, in their order, as they are printed."""
TOKENS = (
    *("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask"),
    *("num_items_in_batch", "generated_at", "token_type_ids", "mm_token_type_ids"),
)
"""Fields of a batch that are no results of a computation with weights."""
Record = dict[str, Any]


@dataclass(frozen=True)
class Difference:
    """The first value of a stage in which two records differ."""

    step: int
    stage: str
    where: str
    """Name of the tensor, or of the completion."""
    size: float
    """Nats of log-probabilities; of a gradient, weights and an optimizer relative to the norm; of others absolute."""
    text: str
    """The difference in words."""
    rounding: bool
    """Whether rounding explains it."""


class Records:
    """Recorded steps of a run, or of their repetition.

    Args:
        folder: with the files.
        rewards: names of the reward functions.
    """

    def __init__(self, folder: Path, rewards: Sequence[str]) -> None:
        self.folder, self.rewards = folder, list(rewards)

    def read(self, kind: str, step: int) -> list[Record]:
        """Return the records of all processes of a step; none if they are not kept."""
        files = [*self.folder.glob(f"{kind}_{step:05d}.pt"), *self.folder.glob(f"{kind}_{step:05d}_*.pt")]
        return [read_record(file) for file in sorted(files, key=lambda file: (len(file.name), file))]


def read_record(file: Path) -> Record:
    """Return the content of a record.

    Raises:
        ConfigError: it is torn.
    """
    try:
        return torch.load(file, weights_only=True)
    except (RuntimeError, EOFError, UnpicklingError, KeyError) as error:
        raise ConfigError(f"{file}: torn, or changed: only steps before it can be computed again") from error


def differences(before: Records, now: Records, step: int, tolerance: float, order: bool = True) -> list[Difference]:
    """Return the first difference of each stage of a step, in the order of the stages.

    Args:
        before: of the run.
        now: of its repetition, or of another run.
        tolerance: largest difference that is rounding.
        order: whether both have taken the problems from the same data.
    """
    result: list[Difference] = []
    for kind, stages in (("rollouts", of_rollouts), ("update", of_update)):
        pairs = list(zip(before.read(kind, step), now.read(kind, step), strict=False))
        for rank, (then, today) in enumerate(pairs):
            on_rank = f" of rank {rank}" if len(pairs) > 1 else ""
            for stage, where, size, text in stages(then, today, before.rewards):
                if stage == "problems" and not order:
                    continue
                fits = size <= tolerance and stage not in ("problems", "completions", "rewards", "learning rate")
                if stage not in [other.stage for other in result]:
                    result.append(Difference(step, stage, where + on_rank, size, text, fits))
    return sorted(result, key=lambda difference: list(STAGES).index(difference.stage))


def start_differences(before: Records, now: Records, step: int) -> list[Difference]:
    """Return in what weights and optimizer differ from those after the step of a checkpoint."""
    result = []
    for then, today in zip(before.read("update", step), now.read("update", step), strict=False):
        for name in ("weights", "optimizer"):
            for where, size, text in of_fingerprints(then[name], today[name]):
                result.append(Difference(step, "start", f"{name}: {where}", size, text, rounding=False))
    return result[:1]


Parts = Iterator[tuple[str, str, float, str]]
"""Stage, place, size and text of differences."""


def of_rollouts(then: Record, now: Record, rewards: Sequence[str]) -> Parts:
    """Return the differences between two records of rollouts."""
    for row, (problem, other) in enumerate(zip(then["order"], now["order"], strict=False)):
        if problem != other:
            yield "problems", f"row {row} of the data loader", 1.0, "another problem"
            break
    for name in TOKENS:
        yield from (("completions", *parts) for parts in of_tensors(name, then["batch"], now["batch"]))
    for row, pair in enumerate(zip(then["rewards"], now["rewards"], strict=False)):
        for name, value, today in zip(rewards, *pair, strict=False):
            if value != today and not (value != value and today != today):
                yield "rewards", f"{name} of completion {row}", abs(today - value), f"{value:.6g}, now {today:.6g}"
    yield from (("advantages", *parts) for parts in of_tensors("advantages", then["batch"], now["batch"]))
    for name in dict.fromkeys([*then["batch"], *now["batch"]]):
        if name not in (*TOKENS, "advantages"):
            parts = of_tensors(name, then["batch"], now["batch"])
            yield from (("old log-probabilities", *rest) for rest in parts)


def of_tensors(name: str, then: Record, now: Record) -> Iterator[tuple[str, float, str]]:
    """Return the first difference between two tensors of batches."""
    if (name in then) != (name in now):
        yield name, float("inf"), f"there is none {'now' if name in then else 'in the run'}"
    if name not in then or name not in now or torch.equal(then[name], now[name]):
        return
    before, today = then[name], now[name]
    if before.shape != today.shape:
        yield name, float("inf"), f"shape {tuple(before.shape)}, now {tuple(today.shape)}"
        return
    apart = (before.double() - today.double()).abs().nan_to_num(torch.inf)
    if apart.any():
        place = tuple(apart.nonzero()[0].tolist())  # none of a number
        row = f"{name} of completion {place[0]}" if place else name
        token = f", token {place[1]}" if len(place) > 1 else ""
        yield row + token, apart.max().item(), f"{before[place].item():.6g}, now {today[place].item():.6g}"


def of_update(then: Record, now: Record, rewards: Sequence[str]) -> Parts:
    """Return the differences between two records of updates."""
    before: dict[int, torch.Tensor] = then.get("log_probs", {})
    today: dict[int, torch.Tensor] = now.get("log_probs", {})
    for number in sorted(before.keys() | today.keys()):
        if (number in before) != (number in today):
            skipped = "skipped now" if number in before else "skipped in the run"
            yield "log-probabilities", f"completion {number}", float("inf"), skipped
        elif not torch.equal(before[number], today[number]):
            apart = apart_by(before[number], today[number])
            worst = max(apart_by(before[key], today[key]).max().item() for key in before.keys() & today.keys())
            place, text = f"completion {number}, token {int(apart.argmax())}", f"{apart.max().item():.2g} nats"
            if before[number].shape != today[number].shape:
                text = f"another completion: {before[number].numel()} tokens, now {today[number].numel()}"
            yield "log-probabilities", place, worst, text
            break
    if "loss" in then and "loss" in now and then["loss"] != now["loss"]:
        apart = abs(then["loss"] - now["loss"])
        yield "loss", "", apart, f"{then['loss']:.8g}, now {now['loss']:.8g}"
    for name in ("gradient", "weights", "optimizer"):
        if name == "weights" and then.get("learning_rate") != now.get("learning_rate"):
            rates = ", now ".join(listed(record["learning_rate"]) for record in (then, now))
            yield "learning rate", "", float("inf"), rates
        if name in then and name in now:
            tensors = list(of_fingerprints(then[name], now[name]))
            if tensors:
                where, _, text = tensors[0]
                others = f", and {len(tensors) - 1} more" if len(tensors) > 1 else ""
                yield name, where, max(size for _, size, _ in tensors), text + others


def listed(rates: Sequence[float]) -> str:
    """Return the learning rates of all groups of weights as text."""
    return " ".join(f"{rate:.6g}" for rate in rates)


def apart_by(values: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return by how much the log-probabilities of a completion differ; infinity for other lengths."""
    return (values - others).abs() if values.shape == others.shape else torch.tensor([torch.inf])


def of_fingerprints(then: Record, now: Record) -> Iterator[tuple[str, float, str]]:
    """Return the tensors whose fingerprints differ."""
    for name in dict.fromkeys([*then, *now]):
        if (name in then) != (name in now):
            yield name, float("inf"), f"there is none {'now' if name in then else 'in the run'}"
        elif then[name][0] != now[name][0]:
            distance = Fingerprint(*then[name]).distance(Fingerprint(*now[name]))
            yield name, distance, f"about {distance:.1g} of its norm" if distance else "by less than 1e-8 of its norm"
