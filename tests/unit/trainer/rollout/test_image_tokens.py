"""Which part of images' tensors belongs to which prompt, and completions that write the token of an image."""

from types import SimpleNamespace

import torch

from grpo.trainer.batch import pick
from grpo.trainer.rollout.image_tokens import by_prompt, can_split, end_before

IMAGE, VIDEO, EOS = 9, 8, 1


def processor(tokens_per_tile: int) -> SimpleNamespace:
    return SimpleNamespace(image_seq_length=tokens_per_tile, image_token_id=IMAGE)


def test_tiles_of_images_follow_their_prompts_as_in_internvl() -> None:
    """Two tokens per tile: one image of one tile, then two images of three and one tiles."""
    prompt_ids, images = [[4, IMAGE, IMAGE, 5], [IMAGE] * 6 + [4] + [IMAGE] * 2], [["a"], ["b", "c"]]
    given = ({"pixel_values": torch.arange(5)}, images, prompt_ids, processor(2))
    assert can_split(*given)
    fields = by_prompt(*given)
    assert [pick(fields, [row])["pixel_values"].tolist() for row in (0, 1)] == [[0], [1, 2, 3, 4]]


def test_images_whose_tensors_cannot_be_told_apart_are_not_split() -> None:
    prompt_ids = [[4, IMAGE, IMAGE, 5], [IMAGE] * 6]
    assert not can_split({"pixel_values": torch.arange(5)}, [["a"], ["b", "c"]], prompt_ids, processor(2))


def test_tiles_are_not_taken_for_images_of_prompts() -> None:
    """An image of three tiles, as in Aya Vision, and two prompts without."""
    tiles = {"pixel_values": torch.arange(3)}
    assert not can_split(tiles, [["a"], [], []], [[IMAGE] * 5, [4], [4]], SimpleNamespace(image_token_id=IMAGE))


def test_images_side_by_side_stay_with_their_row() -> None:
    """Two images, none, and one, padded to two, as in Idefics."""
    given = ({name: torch.arange(6).view(3, 2) for name in ("pixel_values", "pixel_attention_mask")},)
    given += ([["a", "b"], [], ["c"]], [[4]] * 3, SimpleNamespace())
    assert can_split(*given)
    assert [pick(by_prompt(*given), [row]).get("pixel_values", torch.tensor([])).tolist() for row in (0, 1, 2)] == [
        [[0, 1]],
        [],
        [[4, 5]],
    ]


def test_a_completion_ends_before_an_image_that_it_writes() -> None:
    completions = [[4, 5, VIDEO, IMAGE], [4, 5], [IMAGE, 4]]
    logprobs = [[-1.0, -2.0, -3.0, -4.0], [-1.0, -2.0], [-1.0, -2.0]]
    kept, values = end_before({IMAGE, VIDEO}, EOS, completions, logprobs)
    assert kept == [[4, 5], [4, 5], [EOS]]
    assert values == [[-1.0, -2.0], [-1.0, -2.0], [None]]
    assert end_before({IMAGE, VIDEO}, EOS, completions, None)[1] is None
