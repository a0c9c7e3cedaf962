"""Requests to a model behind an OpenAI-compatible endpoint: some at once, repeated, remembered and counted."""

import asyncio
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion

MOST = 20_000
"""Replies that a process remembers; the oldest are forgotten first."""
LONGEST = 2**20
"""Bytes of the longest reply that is read."""
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
    """Repetitions, after growing delays, of a request that fails or is silent for `seconds`."""
    seconds: float
    """A request with its repetitions takes no longer than each of them may, and the delays."""

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
        pauses = sum(min(8.0, 0.5 * 2**number) for number in range(self.retries))  # between the library's repetitions
        limit = self.seconds * (self.retries + 1) + pauses
        async with AsyncOpenAI(**options, timeout=self.seconds) as client:

            async def reply_to(content: str, parse: Callable[[str], Parsed]) -> Parsed:
                async with free, asyncio.timeout(limit):
                    reply = await self._reply(client, content)
                for name in used if reply.usage else ():
                    used[name] += getattr(reply.usage, name) or 0
                return parse(reply.choices[0].message.content or "")

            replies = await asyncio.gather(*(reply_to(*of) for of in new.items()), return_exceptions=True)
        by_content = dict(zip(new, replies, strict=True))
        for content, reply in by_content.items():
            if not isinstance(reply, BaseException):
                _known[self.base_url, self.model, content] = reply
        result = [by_content[c] if c in by_content else _known[self.base_url, self.model, c] for c in contents]
        while len(_known) > MOST:
            _known.popitem(last=False)
        for name, value in {"requests": len(new), "remembered": len(contents) - len(new), **used}.items():
            if log_metric:
                log_metric(f"judge/{name}", float(value))
        return result

    async def _reply(self, client: AsyncOpenAI, content: str) -> ChatCompletion:
        """Return the reply to a content; ValueError if it is longer than `LONGEST`."""
        messages: Any = [{"role": "user", "content": content}]
        body = bytearray()
        asked = client.chat.completions.with_streaming_response.create(
            model=self.model, messages=messages, temperature=0.0
        )
        async with asked as response:
            async for part in response.iter_bytes():
                body += part
                if len(body) > LONGEST:
                    raise ValueError(f"the judge's reply is longer than {LONGEST:,} bytes")
        return ChatCompletion.model_validate_json(body)
