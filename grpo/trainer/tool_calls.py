"""Rollouts whose policy calls tools: their counts, conversations in the log, and greedy answers of an evaluation."""

import copy
import json
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from grpo.trainer.batch import Batch
from grpo.trainer.episodes import BY_TRL
from grpo.trainer.rollout import RolloutTrainer
from grpo.utils.patching import replaced

Message = dict[str, Any]


class ToolCallTrainer(RolloutTrainer):
    """A trainer that counts what becomes of tool calls; TRL makes them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tool_counts: Callable[[], tuple[Counter[str], Counter[str]]] = lambda: (Counter(), Counter())
        """Returns calls and errors of this process so far, by tool."""
        self._counted = self.tool_counts()
        own = BY_TRL if self.environment_factories else ()
        self._counted_names = [*(tool.__name__ for tool in self.tools), *own]

    def answers(self, rows: list[dict[str, Any]]) -> list[list[Message]]:
        """Return the likeliest conversation that follows each row's prompt, tool calls included.

        Args:
            rows: of the data, for `reset` of the environment.
        """
        try:
            with self._greedily(), replaced(self, "num_generations_eval", 1), self._without_metrics():
                _, _, found = self._rollouts(rows)
        finally:
            self._counted = self.tool_counts()
        return found[3]

    def _greedily(self) -> AbstractContextManager[None]:
        """Return a context in which the likeliest completions are generated."""
        if self.use_vllm:
            return self.vllm_generation.greedy()
        greedy = copy.deepcopy(self.generation_config)
        greedy.update(do_sample=False, temperature=None, top_p=None, top_k=None, min_p=None, repetition_penalty=1.0)
        return replaced(self, "generation_config", greedy)

    def _generate(self, prompts: list) -> Any:
        found = super()._generate(prompts)
        if self.tools and self.model.training:
            unanswered = torch.tensor([not is_answered(messages) for messages in found[3]], dtype=torch.float)
            share = self.accelerator.gather(unanswered.to(self.accelerator.device)).mean().item()
            self._metrics["train"]["tools/unanswered"].append(share)
        return found

    def _generate_and_score_completions(self, inputs: Any) -> Batch:
        batch = super()._generate_and_score_completions(inputs)
        if self.tools and self.model.training:
            self._log_calls()
        return batch

    def _log_calls(self) -> None:
        """Log the calls and errors of each tool since the last time, of all processes."""
        names, now = self._counted_names, self.tool_counts()
        counts = [[float(new[name] - old[name]) for name in names] for new, old in zip(now, self._counted, strict=True)]
        self._counted = now
        calls, errors = self.accelerator.reduce(torch.tensor(counts, device=self.accelerator.device), "sum").tolist()
        for name, number, failed in zip(names, calls, errors, strict=True):
            if name not in BY_TRL:
                self._metrics["train"][f"tools/{name}/calls"].append(number)
            self._metrics["train"][f"tools/{name}/errors"].append(failed)

    def _calculate_rewards(self, inputs: list, prompts: list, completions: list, *args: Any) -> torch.Tensor:
        """Score conversations; what is logged of them has arguments as text, as a table needs one type a column."""
        rewards = super()._calculate_rewards(inputs, prompts, completions, *args)
        if self.tools:
            completions[:] = [[loggable(message) for message in messages] for messages in completions]
        return rewards


def is_answered(messages: list[Message]) -> bool:
    """Whether a conversation ends with an answer of the policy, and not with a call or the result of one."""
    return bool(messages) and messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")


def loggable(message: Message) -> Message:
    """Return a message whose tool calls, if it has any, have their arguments as JSON."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function") or call
        given = function.get("arguments")
        text = given if isinstance(given, str) else json.dumps(given if isinstance(given, dict) else {"": given})
        calls.append({"type": "function", "function": {"name": str(function.get("name")), "arguments": text}})
    return {**message, "tool_calls": calls}
