"""A processor takes the images of a group's prompt once, and returns what it would for each completion."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from grpo.trainer.rollout.image_tokens import as_tensors
from grpo.trainer.rollout.once_per_group import once_per_group
from tests.vision_policies import FAMILIES, make_processor, problems


def flat(found: dict[str, Any]) -> dict[str, Any]:
    """Values that compare: of tensors, and of lists as generation gets them."""
    return {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in found.items()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("padding", [{"padding": True, "return_tensors": "pt"}, {}], ids=["padded", "lists"])
def test_a_groups_images_are_prepared_once(family: str, padding: dict[str, Any], monkeypatch: Any) -> None:
    """Prompts of one and of two images of several sizes, in groups of 3; the same text with another image."""
    stock = make_processor(family)
    rows = [row for row in problems().select([0, 4, 3]) for _ in range(3)]
    sign = stock.apply_chat_template([{"role": "user", "content": [{"type": "image"}]}])
    texts = [sign * len(row["images"]) + row["prompt"][0]["content"] for row in rows]
    images = [row["images"] for row in rows]
    expected = as_tensors(dict(stock(images=images, text=texts, **padding)))

    kind = type(stock.image_processor)
    calls = Mock(side_effect=kind.__call__)
    monkeypatch.setattr(kind, "__call__", lambda self, images, **options: calls(self, images, **options))
    found = once_per_group(stock)(images=images, text=texts, **padding)
    assert flat(as_tensors(dict(found))) == flat(expected)
    assert [len(of) for of in calls.call_args.args[1]] == [1, 1, 2]


def test_a_tokenizer_stays_as_it_is() -> None:
    tokenizer = make_processor("llava_next").tokenizer
    assert once_per_group(tokenizer) is tokenizer
