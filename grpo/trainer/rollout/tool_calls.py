"""Rollouts whose policy calls tools: the counts of calls and errors, and conversations in the log."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from statistics import mean
from typing import Any

import torch
from trl.chat_template_utils import parse_response

from grpo.trainer.batch import Batch
from grpo.trainer.rollout.completion import Completion
from grpo.trainer.rollout.episodes import BY_TRL
from grpo.trainer.rollout.stages import Stage

DEEPEST = 100
"""Levels of nested arguments of a call; Python's own readers and writers end somewhere below a thousand."""
Message = dict[str, Any]
Counts = Callable[[], tuple[Counter[str], Counter[str]]]
"""Returns calls and errors of this process so far, by tool."""


class ToolCalls(Stage):
    """Logs the tool calls that TRL makes, and the conversations that end without an answer.

    Args:
        counts: of the functions that are called.
        names: of these functions.
    """

    def __init__(self, counts: Counts, names: Sequence[str]) -> None:
        self.counts, self.names = counts, names
        self._before = counts()

    def assemble(self, trainer: Any, completions: Sequence[Completion], batch_of: Callable[[], Batch]) -> Batch:
        """Return the batch, and log the calls of a training's."""
        batch = batch_of()
        if trainer.model.training:
            unanswered = mean(not is_answered(completion.messages) for completion in completions)
            trainer.note(self.metrics(trainer.accelerator) | {"tools/unanswered": unanswered})
        return batch

    def discard(self) -> None:
        """Do not count the calls so far."""
        self._before = self.counts()

    def metrics(self, accelerator: Any) -> dict[str, float]:
        """Return calls and errors of each tool since the last time, of all processes, by the name of the metric."""
        now = self.counts()
        counts = [
            [float(new[name] - old[name]) for name in self.names] for new, old in zip(now, self._before, strict=True)
        ]
        self._before = now
        calls, errors = accelerator.reduce(torch.tensor(counts, device=accelerator.device), "sum").tolist()
        metrics = {f"tools/{name}/errors": failed for name, failed in zip(self.names, errors, strict=True)}
        numbers = zip(self.names, calls, strict=True)
        return metrics | {f"tools/{name}/calls": number for name, number in numbers if name not in BY_TRL}


def is_answered(messages: list[Message]) -> bool:
    """Whether a conversation ends with an answer of the policy, and not with a call or the result of one."""
    return bool(messages) and messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")


def as_text(message: Message) -> Message:
    """Return a message with text alone: the sizes of images that a tool has returned stand in their places."""
    if not isinstance(message.get("content"), list):
        return message
    parts = [part.get("text") or "[image, {} x {}]".format(*part["image"].size) for part in message["content"]]
    return {**message, "content": " ".join(parts)}


def loggable(message: Message) -> Message:
    """Return a message whose tool calls, if it has any, have their arguments as JSON, as a table needs one type."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function") or call
        text = as_object(function.get("arguments"))
        calls.append({"type": "function", "function": {"name": function.get("name"), "arguments": text}})
    return {**message, "tool_calls": calls}


def as_object(arguments: Any) -> str:
    """Return arguments as the JSON of an object, which they may be already."""
    with suppress(ValueError, RecursionError):
        if isinstance(arguments, str) and isinstance(json.loads(arguments), dict):
            return arguments
    return json.dumps(arguments if isinstance(arguments, dict) else {"": arguments})


def parsed(tokenizer: Any, ids: list[int], **options: Any) -> Message:
    """Return a completion as TRL parses it, with valid text; one that is nested too deeply is text, as others are."""
    try:
        return valid(parse_response(tokenizer, ids, **options))
    except RecursionError:
        return {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}


def valid(value: Any, depth: int = DEEPEST) -> Any:
    """Return JSON whose texts are valid Unicode: half of a UTF-16 pair is replaced.

    Raises:
        RecursionError: it is nested more deeply than this.
    """
    if depth == 0:
        raise RecursionError
    if isinstance(value, dict):
        return {valid(key, depth - 1): valid(item, depth - 1) for key, item in value.items()}
    if isinstance(value, list):
        return [valid(item, depth - 1) for item in value]
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if isinstance(value, str) else value
