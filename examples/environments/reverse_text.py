"""A taskset of verifiers: reverse the order of characters. The reward is the similarity to the reversed text."""

import random
from collections.abc import Iterator
from difflib import SequenceMatcher

import verifiers.v1 as vf

__all__ = ["ReverseText"]


class Text(vf.TaskData):
    """A task with its solution."""

    answer: str


class Reverse(vf.Task[Text]):
    """Scores of a reply."""

    @vf.reward
    async def similarity(self, trace: vf.Trace) -> float:
        """Return the similarity of the reply and the solution, from 0 to 1; 1 if they are equal."""
        return SequenceMatcher(None, trace.last_reply, self.data.answer).ratio()

    @vf.metric
    async def exact(self, trace: vf.Trace) -> float:
        """Return 1 if the reply is the solution."""
        return float(trace.last_reply == self.data.answer)


class ReverseTextConfig(vf.TasksetConfig):
    """What a command line can change, by `task.environment_args`."""

    alphabet: str = "0123456789"
    length: int = 3
    examples: int = 4
    seed: int = 0


class ReverseText(vf.Taskset[Reverse, ReverseTextConfig]):
    """Endless texts of single characters, each after some examples."""

    INFINITE = True

    def load(self) -> Iterator[Reverse]:
        """Yield tasks."""
        rng = random.Random(self.config.seed)
        while True:
            texts = [rng.choices(self.config.alphabet, k=self.config.length) for _ in range(self.config.examples + 1)]
            messages: vf.Messages = []
            for text in texts:
                messages.append(vf.UserMessage(content=" ".join(text)))
                messages.append(vf.AssistantMessage(content=" ".join(reversed(text))))
            *prompt, reply = messages
            yield Reverse(Text(prompt=prompt, answer=str(reply.content)), self.config.task)
