"""A processor takes the images of a group's prompt once, and returns what it would for each completion."""

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from grpo.trainer.rollout.image_tokens import as_tensors
from grpo.trainer.rollout.once_per_group import once_per_group
from tests.vision_policies import FAMILIES, idefics, make_processor, problems


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


@pytest.mark.parametrize("family", ["idefics3", "llava_next"])
def test_texts_without_images_get_those_of_no_other(family: str) -> None:
    """Two images and none: as many images as texts, so that a tensor may be of an image or of a text."""
    stock = idefics()[1] if family == "idefics3" else make_processor(family)
    pictures = problems()[3]["images"]
    given = {"text": ["<image><image>a"] * 4 + ["b"] * 2, "images": [pictures] * 4 + [[]] * 2, "padding": True}
    given["return_tensors"] = "pt"
    assert flat(once_per_group(stock)(**given)) == flat(stock(**given))


def test_images_that_do_not_compare_are_taken_as_they_come() -> None:
    stock = make_processor("llava_next")
    given = {"text": ["<image>a"] * 2, "images": [[np.zeros((30, 30, 3), np.uint8)] for _ in range(2)]}
    assert flat(as_tensors(dict(once_per_group(stock)(**given)))) == flat(as_tensors(dict(stock(**given))))


def test_a_tokenizer_stays_as_it_is() -> None:
    tokenizer = make_processor("llava_next").tokenizer
    assert once_per_group(tokenizer) is tokenizer
