"""Images of logged completions: small files, each once, and none in logs and checkpoints."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from pyarrow import parquet

from grpo.trainer import ExactGRPOTrainer, Update
from grpo.trainer.rollout import thumbnails
from grpo.trainer.rollout.thumbnails import SIDE, Thumbnails, reduced, without_images
from tests.stock_trl import VOCABULARY, make
from tests.vision_policies import options


def picture(seed: int, width: int = 300, height: int = 200) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def test_each_image_has_one_small_file_named_after_its_pixels(tmp_path: Path) -> None:
    files = Thumbnails(tmp_path / "images")
    first, again, other = files.keep([picture(0), picture(0), picture(1)], 1.0)
    assert first == again != other
    assert sorted(file.name for file in (tmp_path / "images").iterdir()) == sorted([first, other])
    with Image.open(tmp_path / "images" / first) as kept:
        assert (kept.size, kept.format, kept.mode) == ((256, 171), "JPEG", "RGB")
    same_bytes = [Image.frombytes("RGB", size, bytes(24)) for size in ((2, 4), (4, 2))]
    assert len(set(files.keep(same_bytes, 1.0))) == 2


def test_a_file_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    (name,) = Thumbnails(tmp_path).keep([picture(0)], 1.0)
    (tmp_path / name).write_bytes(b"first")
    assert Thumbnails(tmp_path).keep([picture(0)], 1.0) == [name]
    assert (tmp_path / name).read_bytes() == b"first"


@pytest.mark.parametrize(("size", "expected"), [((8000, 40), (256, 1)), ((16_000, 2), (256, 1)), ((8, 8), (8, 8))])
def test_no_side_is_longer_than_the_limit_and_none_is_lost(size: tuple[int, int], expected: tuple[int, int]) -> None:
    kept = Image.open(io.BytesIO(reduced(Image.new("RGB", size, "red"))))
    assert kept.size == expected
    assert max(expected) <= SIDE


def test_nothing_but_the_pixels_is_kept() -> None:
    buffer = io.BytesIO()
    exif = Image.Exif()
    exif[0x010E] = "secret"
    picture(0).save(buffer, "JPEG", comment="secret" * 1000, exif=exif, icc_profile=b"secret" * 1000)
    with Image.open(buffer) as image:
        assert b"secret" not in reduced(image)


def test_files_take_disk_only_for_the_finished_part_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(reduced(picture(0)))
    monkeypatch.setattr(thumbnails, "MAX_BYTES", 10 * size)
    for step in range(1, 11):
        names = Thumbnails(tmp_path).keep([picture(5 * step + place) for place in range(5)], step / 10)
        assert len(set(names)) == 5, "an image without a file has a name"
        used = sum(file.stat().st_size for file in tmp_path.iterdir())
        assert (step - 0.5) * size < used < (step + 1) * size
        assert any((tmp_path / name).exists() for name in names)


def test_processes_share_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thumbnails, "MAX_BYTES", 10 * len(reduced(picture(0))))
    for process in range(2):
        Thumbnails(tmp_path / str(process), 2).keep([picture(number) for number in range(20)], 1.0)
        assert 5 <= len(list((tmp_path / str(process)).iterdir())) <= 6


def test_prompts_with_and_without_images_can_be_in_one_table(tmp_path: Path) -> None:
    image, text = {"type": "image", "image": picture(0)}, {"type": "text", "text": "How many?"}
    logged = [
        without_images([{"role": "user", "content": [image, text]}]),
        without_images([{"role": "user", "content": "And without an image?"}]),
        without_images([{"role": "assistant", "content": None}]),
    ]
    pandas.DataFrame({"prompt": logged}).to_parquet(tmp_path / "a.parquet")
    found = parquet.read_table(tmp_path / "a.parquet")["prompt"].to_pylist()
    assert [part["type"] for part in found[0][0]["content"]] == ["image", "text"]
    assert found[1][0]["content"] == [{"type": "text", "text": "And without an image?"}]
    assert without_images("plain text") == "plain text"


def rollouts(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """Completions from PyTorch's own generator, whose state a checkpoint has."""
    completions = [torch.randint(3, VOCABULARY, (int(torch.randint(1, 20, ())),)).tolist() for _ in prompts]
    return {"prompt_ids": trainer._tokenize_prompts(prompts)[0], "completion_ids": completions, "logprobs": None}


def trained(folder: Path, resumed: Path | None = None, method: str = "full", **more: Any) -> ExactGRPOTrainer:
    """A small policy with images after three steps, two of them with the same rollouts."""
    given = options("llava_next", method) | {"rollout_func": rollouts, "log_completions": True}
    saving = {"save_strategy": "steps", "save_steps": 1}
    trainer = make(ExactGRPOTrainer, folder, update=Update(200), keep_columns=True, **given | saving | more)
    trainer.train(resume_from_checkpoint=str(resumed) if resumed else None)
    return trainer


@pytest.mark.parametrize("method", ["full", "LoRA"])
def test_a_training_with_images_resumes_bit_for_bit_without_them(tmp_path: Path, method: str) -> None:
    whole = trained(tmp_path / "whole", method=method)
    assert "PIL" not in str([turn for prompt in whole._logs["prompt"] for turn in prompt])
    for step in (1, 2):
        checkpoint = tmp_path / "whole" / f"checkpoint-{step}"
        again = trained(tmp_path / "again", checkpoint, method)
        for name, weight in whole.model.state_dict().items():
            assert torch.equal(again.model.state_dict()[name], weight), (step, name)
        assert again._logs["prompt"] == whole._logs["prompt"]
        assert again._logs["extra"] == whole._logs["extra"]
    tables = [tmp_path / run / "completions" / "completions_00003.parquet" for run in ("whole", "again")]
    assert parquet.read_table(tables[0]).equals(parquet.read_table(tables[1]))


def test_completions_name_the_files_of_their_images(tmp_path: Path) -> None:
    trained(tmp_path)
    folder = tmp_path / "completions"
    tables = [parquet.read_table(file).to_pylist() for file in sorted(folder.glob("*.parquet"))]
    named = [row["thumbnails"] for rows in tables for row in rows]
    assert {len(names) for names in named} == {1, 2}
    assert {name for names in named for name in names} == {file.name for file in (folder / "images").iterdir()}
    for rows in tables:
        for row in rows:
            places = [part["type"] for turn in row["prompt"] for part in turn["content"]]
            assert places.count("image") == len(row["thumbnails"])


def test_without_a_log_of_completions_no_image_is_kept(tmp_path: Path) -> None:
    trainer = trained(tmp_path, log_completions=False)
    assert not (tmp_path / "completions").exists()
    assert "thumbnails" not in trainer._logs["extra"]
    json.dumps(list(trainer._logs["prompt"]))
