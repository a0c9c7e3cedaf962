"""Facts about the problems and the policy: filtered rows, duplicates, answers, and the chat template."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from grpo.config.resolve import Resolved
from grpo.data.task import Problems

INSTRUCT = re.compile(r"(?:^|[-_.])(?:instruct|chat|it|sft|dpo|rlhf)(?:[-_.]|$)")
BASE = re.compile(r"(?:^|[-_.])(?:base|pt)(?:[-_.]|$)")


def facts(settings: Resolved, name: str, problems: Problems, processing_class: Any) -> dict[str, Any]:
    """Return the facts before any completion: `model`, `engine`, `counts` of rows, `duplicates`, `chat_template`.

    `warning` is a warning about a template that does not suit the model; None if it does. `begins_thought` says whether
    the template ends a prompt with the beginning of a thought.

    Args:
        name: name of the model.
    """
    train, held_out = problems.train, problems.held_out
    template = getattr(processing_class, "chat_template", None)
    conversational = bool(settings.task.conversational)
    shown = questions(train["prompt"]), questions(held_out["prompt"]) if held_out else []
    return {
        "model": name,
        "counts": problems.counts,
        "duplicates": duplicates(*shown) if not settings.task.images else None,
        "chat_template": "the model's own" if conversational else None,
        "warning": template_warning(name, conversational, bool(template)),
        "begins_thought": begins_thought(processing_class, train["prompt"][0]),
        "engine": "vLLM" if settings.train.use_vllm else "transformers",
    }


def begins_thought(processing_class: Any, prompt: Any) -> bool:
    """Return whether a prompt ends with the beginning of a thought: its template may have put it there."""
    text = prompt
    if not isinstance(prompt, str):
        text = processing_class.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return text.rstrip().endswith("<think>")


def questions(prompts: Sequence[Any]) -> list[str]:
    """Return the letters and digits of each question, in lower case."""
    texts = [prompt if isinstance(prompt, str) else prompt[-1]["content"] for prompt in prompts]
    return ["".join(filter(str.isalnum, str(text).casefold())) for text in texts]


def duplicates(train: Sequence[str], held_out: Sequence[str]) -> dict[str, int]:
    """Return how many training problems are also held out, or repeat another training problem, ignoring punctuation."""
    known = set(held_out)
    repeated = sum(count - 1 for count in Counter(train).values())
    return {"held_out": sum(question in known for question in train), "within": repeated}


def template_warning(name: str, conversational: bool, has_template: bool) -> str | None:
    """Return a warning if the name of a model and the form of the prompts do not match."""
    words = name.rstrip("/").rpartition("/")[2].casefold()
    if conversational and BASE.search(words):
        return f"{name} is a base model by its name, and the prompts have a chat template: task.conversational=false"
    if not conversational and has_template and INSTRUCT.search(words):
        return f"{name} is an instruct model by its name, and the prompts lack its template: task.conversational=true"
    return None
