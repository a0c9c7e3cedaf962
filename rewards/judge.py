"""Score of a completion by an LLM judge behind an OpenAI-compatible endpoint; combine it with `correctness`."""

from collections.abc import Callable, Sequence
from typing import Any

from rewards import judging
from rewards.chat import Chat
from rewards.text import text_of


async def judge(
    completions: Sequence[Any],
    prompts: Sequence[Any],
    model: str,
    base_url: str,
    prompt: str | None = None,
    compare: bool = False,
    rubric: str = judging.RUBRIC,
    group_id: Sequence[int] = (),
    at_once: int = 16,
    retries: int = 3,
    seconds: float = 60.0,
    log_metric: Callable[[str, float], None] | None = None,
    **columns: Any,
) -> list[float | BaseException]:
    """Return a score from 0 to 1 for each completion; the other arguments are those of `rewards.chat.Chat`.

    Args:
        prompt: template with `{question}`, `{answer}`, `{mark}` and other columns, and `{completion}`; with `compare`
            `{replies}`, `{ids}`, `{count}` and `{rubric}` instead of it. None takes the built-in one.
        compare: whether the judge sees the completions of a group together.
        rubric: what makes a reply better than another.
    """
    texts, fields = [*map(text_of, completions)], {key: v for key, v in columns.items() if isinstance(v, list)}
    known = [
        {"question": text_of(asked), "answer": ""} | {key: values[row] for key, values in fields.items()}
        for row, asked in enumerate(prompts)
    ]
    chat = Chat(model, base_url, at_once, retries, seconds)
    if compare:
        return await judging.ranked(chat, prompt or judging.COMPARISON, rubric, texts, known, group_id, log_metric)
    contents = [
        (prompt or judging.PROMPT).format(**of | {"completion": text, "mark": judging.mark_of(text)})
        for of, text in zip(known, texts, strict=True)
    ]
    return await chat.ask(contents, [judging.score] * len(contents), log_metric)


judge.compares = "compare"  # type: ignore[attr-defined]
