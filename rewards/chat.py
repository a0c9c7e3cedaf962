"""Requests to a model behind an OpenAI-compatible endpoint: some at once, repeated, remembered and counted."""

import asyncio
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from openai import AsyncOpenAI

MOST = 20_000
"""Replies that a process remembers; the oldest are forgotten first."""
Parsed = TypeVar("Parsed")
_known: "OrderedDict[tuple[str, str, str], Any]" = OrderedDict()


@dataclass
class Chat:
    """A model and how it is asked; an API key is read from OPENAI_API_KEY in the environment."""

    model: str
    base_url: str
    at_once: int
    """Concurrent requests."""
    retries: int
    """Repetitions, after growing delays, of a request that fails or takes more than `seconds`."""
    seconds: float

    async def ask(
        self,
        contents: Sequence[str],
        parsers: Sequence[Callable[[str], Parsed]],
        log_metric: Callable[[str, float], None] | None,
    ) -> list[Parsed | BaseException]:
        """Return what each parser makes of the reply to its content, or the exception of this content.

        Equal contents are sent once, and what a parser has accepted is remembered. `judge/requests`, `judge/remembered`
        and the tokens that the endpoint counts are logged.
        """
        free, key = asyncio.Semaphore(self.at_once), os.environ.get("OPENAI_API_KEY", "none")
        used = {"prompt_tokens": 0, "completion_tokens": 0}
        new = {c: p for c, p in zip(contents, parsers, strict=True) if (self.base_url, self.model, c) not in _known}
        options: dict[str, Any] = {"base_url": self.base_url, "api_key": key, "max_retries": self.retries}
        async with AsyncOpenAI(**options, timeout=self.seconds) as client:

            async def one(content: str, parse: Callable[[str], Parsed]) -> Parsed:
                messages = [{"role": "user", "content": content}]
                async with free:
                    reply = await client.chat.completions.create(model=self.model, messages=messages, temperature=0.0)
                for name in used if reply.usage else ():
                    used[name] += getattr(reply.usage, name) or 0
                return parse(reply.choices[0].message.content or "")

            replies = await asyncio.gather(*(one(*of) for of in new.items()), return_exceptions=True)
        found = dict(zip(new, replies, strict=True))
        for content, reply in found.items():
            if not isinstance(reply, BaseException):
                _known[self.base_url, self.model, content] = reply
        result = [found[c] if c in found else _known[self.base_url, self.model, c] for c in contents]
        while len(_known) > MOST:
            _known.popitem(last=False)
        for name, value in {"requests": len(new), "remembered": len(contents) - len(new), **used}.items():
            if log_metric:
                log_metric(f"judge/{name}", float(value))
        return result
