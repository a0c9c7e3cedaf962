"""Values of the update per token, for a few completions of each logged step: `completions.tokens=true`.

`completions/tokens_00012.parquet` has a row per completion. Its `completion_id` is that of the row in
`completions_00012.parquet`; every other column is a list with a value per token: the `token` as text, `kind` (`loss`,
or `tool` and `image` for tokens that the loss does not count), `logp` and `entropy` (nats) by the policy before the
update, `advantage`, `ratio` (the importance ratio to the policy that generated, of the token or the sequence, as
`train.importance_sampling_level` says), `clipped` (as TRL counts it for its metric `clip_ratio`), and with vLLM
`correction` (TRL's importance sampling ratio between policy and engine).
"""

from pathlib import Path
from typing import Any

import pyarrow
import torch
from accelerate.utils import gather_object
from pyarrow import parquet
from tokenizers.decoders import DecodeStream

from grpo.trainer.batch import Batch, loss_mask
from grpo.trainer.update.loss import tokens_of
from grpo.utils.atomic import atomic

SAMPLE = 8
"""Completions per step."""
KINDS = ("loss", "tool", "image")
"""The loss counts the first alone."""
CLIPS = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
"""TRL's losses that clip the importance ratio on both sides; CISPO clips above, and others do not clip."""
Row = dict[str, Any]


class Watcher:
    """Sees each micro-batch of an update, as an item of `ExactGRPOTrainer.watchers`."""

    def note(self, trainer: Any, inputs: Batch, loss: torch.Tensor, logps: torch.Tensor, entropies: Any = None) -> None:
        """See a micro-batch, without waiting for the GPU.

        Args:
            trainer: an `ExactGRPOTrainer`; its `part` is the micro-batch, None where the loss is not divided.
            inputs: the micro-batch.
            loss: of the micro-batch alone, a scalar.
            logps: log-probabilities of the completions, (rows, length).
            entropies: likewise; None where the loss computes none.
        """

    def forget(self) -> None:
        """Drop the micro-batches of a step that begins again: a process that ran out of memory computed zeros."""

    def write(self, trainer: Any) -> None:
        """Write down the step that is logged; every process calls it."""


class TokenValues(Watcher):
    """Keeps the values of a step's completions until they are logged.

    Args:
        folder: of the run's completions.
        tokenizer: of the policy.
        image_token: id of the token of an image; None if there is none.
    """

    def __init__(self, folder: Path, tokenizer: Any, image_token: int | None) -> None:
        self.folder, self.tokenizer, self.image_token = folder, tokenizer, image_token
        self._step = -1
        self._rows: dict[int, dict[str, torch.Tensor]] = {}

    def forget(self) -> None:
        self._rows = {}

    def note(self, trainer: Any, inputs: Batch, loss: torch.Tensor, logps: torch.Tensor, entropies: Any = None) -> None:
        if "completion_id" not in inputs:  # of a generation before the resumed run asked for values
            return
        if trainer.state.global_step != self._step:
            self._step, self._rows = trainer.state.global_step, {}
        values = {
            "token": inputs["completion_ids"],
            "kind": self._kinds(inputs),
            "logp": logps,
            "entropy": entropies,
            "advantage": inputs["advantages"].view(len(logps), -1),
            **ratio_and_clipped(trainer, inputs, logps),
        }
        if (correction := inputs.get("importance_sampling_ratio")) is not None:
            values["correction"] = correction.view(len(logps), -1)
        on_cpu = {name: value.detach().expand(logps.shape).cpu() for name, value in values.items()}
        lengths = inputs["completion_mask"].sum(1).tolist()
        for row, (number, length) in enumerate(zip(inputs["completion_id"].tolist(), lengths, strict=True)):
            if length:
                self._rows[number] = {name: value[row, :length] for name, value in on_cpu.items()}

    def _kinds(self, inputs: Batch) -> torch.Tensor:
        """Return the kind of each token as its place in `KINDS`, (rows, length)."""
        of_tool = (inputs["completion_mask"] != 0) & (loss_mask(inputs) == 0)
        image = inputs["completion_ids"] == (-1 if self.image_token is None else self.image_token)
        return of_tool.long() + (of_tool & image)

    def write(self, trainer: Any) -> None:
        """Write the values of a sample of the completions of the step that is logged; every process has to call it."""
        everyones = sorted(set(gather_object(list(self._rows))))
        count = min(SAMPLE, len(everyones))
        sample = {everyones[place * len(everyones) // count] for place in range(count)}
        rows = gather_object([self._as_lists(number) for number in sample & self._rows.keys()])
        self._rows = {}
        if rows and trainer.accelerator.is_main_process:
            rows.sort(key=lambda row: row["completion_id"])
            self.folder.mkdir(parents=True, exist_ok=True)
            with atomic(self.folder / f"tokens_{trainer.state.global_step:05d}.parquet") as partial:
                parquet.write_table(pyarrow.Table.from_pylist(rows), partial)

    def _as_lists(self, number: int) -> Row:
        """Return the values of a completion as lists; numbers that are not finite are None."""
        values = self._rows[number]
        row: Row = {"completion_id": number, "token": texts(self.tokenizer, values["token"].tolist())}
        row |= {"kind": [KINDS[kind] for kind in values["kind"].tolist()], "clipped": values["clipped"].tolist()}
        for name in values.keys() - row.keys():
            finite = values[name].isfinite().tolist()
            numbers = values[name].float().tolist()
            row[name] = [value if there else None for value, there in zip(numbers, finite, strict=True)]
        return row


def ratio_and_clipped(trainer: Any, inputs: Batch, logps: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return TRL's importance ratio of each token, and whether the loss clips it, (rows, length) or (rows, 1)."""
    if trainer.own_loss:
        tokens = tokens_of(inputs, logps)
        _, metrics = trainer.own_loss.per_token(tokens, trainer.args)
        clipped = metrics.get("clip_ratio/region_mean", torch.zeros_like(logps, dtype=torch.bool))
        return {"ratio": (logps - tokens.old_logps).exp(), "clipped": clipped}
    mask, advantages = loss_mask(inputs), inputs["advantages"].view(len(logps), -1)
    log_ratio = logps - inputs.get("old_per_token_logps", logps)
    if trainer.importance_sampling_level == "sequence":
        log_ratio = ((log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0))[:, None]
    ratio = log_ratio.exp()
    if trainer.loss_type == "cispo":
        return {"ratio": ratio, "clipped": (ratio > trainer.epsilon_high) & (advantages > 0)}
    if trainer.loss_type not in CLIPS:
        return {"ratio": ratio, "clipped": torch.zeros_like(ratio, dtype=torch.bool)}
    bounded = ratio if trainer.args.delta is None else ratio.clamp(max=trainer.args.delta)
    low = (bounded < 1 - trainer.epsilon_low) & (advantages < 0)
    return {"ratio": ratio, "clipped": low | (bounded > 1 + trainer.epsilon_high) & (advantages > 0)}


def texts(tokenizer: Any, ids: list[int]) -> list[str]:
    """Return each token as text; one that ends a character that began in earlier ones has it whole."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        return [tokenizer.decode([token]) for token in ids]
    stream = DecodeStream(skip_special_tokens=False)
    return [stream.step(fast, token) or "" for token in ids]
