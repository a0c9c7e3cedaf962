"""A policy that sees images: they follow their sequences into micro-batches and into halves of generation."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from datasets import Dataset
from trl import GRPOTrainer

from benchmarks.exactness import FOUR, IMAGES, compare
from grpo.generation.transformers.growing_cache import CACHE
from grpo.options import Rollout, Update
from grpo.trainer import ExactGRPOTrainer
from grpo.view.images import View
from tests.stock_trl import make, relative_difference, train
from tests.vision_policies import FAMILIES, METHODS, idefics, options, problems


@pytest.mark.parametrize("case", IMAGES)
def test_gradient_with_images_is_that_of_stock_trl(case: str, caplog: pytest.LogCaptureFixture) -> None:
    compared = compare(IMAGES[case]())
    assert "do not share" not in caplog.text
    assert max(compared.gradients) <= 1e-5
    assert compared.ours.logs[0]["update/microbatches"] >= 3
    assert compared.ours.logs[0]["update/rows_skipped"] == 4
    of_tower = [
        value
        for gradient in compared.ours.gradients
        for name, value in gradient.items()
        if ".vision_tower." in name or ".blocks." in name
    ]
    assert any(value.any() for value in of_tower) == case.endswith((METHODS[0], METHODS[3]))


class Scene:
    """An environment that shows an image after those of the data."""

    def reset(self, number: int, images: Sequence[Any] = (), **columns: Any) -> list[dict[str, Any]]:
        return [{"type": "image"} for _ in images] + [{"type": "image", "image": problems()[number]["images"][0]}]


def by_seed(trainer: Any) -> Any:
    """A trainer whose completions are the same, whatever makes them."""
    generator = torch.Generator().manual_seed(3)

    def single_turn(prompt_ids: list, *args: Any, **options: Any) -> tuple[list, None]:
        lengths = torch.randint(2, 9, (len(prompt_ids),), generator=generator).tolist()
        return [torch.randint(7, 40, (length,), generator=generator).tolist() for length in lengths], None

    trainer._generate_single_turn = single_turn
    return trainer


@pytest.mark.parametrize("choice", ["an environment", "one of two"])
@pytest.mark.parametrize("columns", [["prompt"], ["prompt", "images"]], ids=["alone", "beside the data's"])
def test_images_of_observations_train_as_in_stock_trl(tmp_path: Path, columns: list[str], choice: str) -> None:
    data = problems().select_columns(columns).add_column("number", list(range(16)))
    data = data.add_column("environment", ["scene", "other"] * 8)
    environments = {"scene": Scene, "other": Scene} if choice == "one of two" else Scene

    def trainer(kind: type[GRPOTrainer], **more: Any) -> Any:
        given = options("qwen2_5_vl", "full") | {"rollout_func": None, "train_dataset": data, **more}
        calls = "{% for call in message.get('tool_calls') or [] %}{{ call | tojson }}{% endfor %}"  # which TRL asks for
        end = "{% endfor %}{% endif %}"
        processor = given["processing_class"]
        processor.chat_template = processor.chat_template.replace(end, end + calls)
        return by_seed(make(kind, tmp_path, environment_factory=environments, log_completions=True, **given))

    mine = trainer(ExactGRPOTrainer, update=Update(200))
    record = train(mine)
    theirs = train(trainer(GRPOTrainer), record.weights)
    for gradient, expected in zip(record.gradients, theirs.gradients, strict=True):
        assert relative_difference(gradient, expected) < 1e-5
    logged = [part for prompt in mine._logs["prompt"] for turn in prompt for part in turn["content"]]
    assert not any("image" in part for part in logged), "a table holds none"
    if choice == "an environment":
        chosen = train(trainer(ExactGRPOTrainer, rollout=Rollout(dynamic_sampling=True))).logs
        assert all(log["grad_norm"] > 0 for log in chosen), "it stops where images and their tokens differ in number"


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_without_images_train_among_others(tmp_path: Path, family: str) -> None:
    given = options(family, "full") | {"rollout_func": None}
    rows = [row | {"images": row["images"] if place % 2 else []} for place, row in enumerate(given["train_dataset"])]
    given["train_dataset"] = Dataset.from_list(rows, features=given["train_dataset"].features)
    trainer = make(ExactGRPOTrainer, tmp_path, update=Update(200), **given)
    record = train(trainer)
    assert len(record.logs) == 3
    assert all(log["grad_norm"] > 0 for log in record.logs)


def test_as_many_images_as_rows_stay_with_their_rows(tmp_path: Path) -> None:
    """Two images and none in turns: in Idefics a tensor of a row, which TRL would take for that of an image."""
    model, processor = idefics()
    pictures = problems()[3]["images"]
    rows = [row | {"images": pictures if place % 2 else []} for place, row in enumerate(problems())]
    data = Dataset.from_list(rows, features=problems().features)
    given = {"model": model, "processing_class": processor, "train_dataset": data, "rollout_func": None}
    trainer, shown = make(ExactGRPOTrainer, tmp_path, **given, **FOUR), list[tuple[bool, bool]]()
    gradient = trainer.step_update.gradient

    def noted(policy: Any, slices: Any, *others: Any) -> Any:
        for part in slices:
            token = part["prompt_ids"] == processor.image_token_id
            shown.extend(zip(token.any(1).tolist(), part["pixel_values"].flatten(1).any(1).tolist(), strict=True))
        return gradient(policy, slices, *others)

    trainer.step_update.gradient = noted
    train(trainer)
    assert all(text == picture for text, picture in shown)
    assert {text for text, _ in shown} == {False, True}


def test_generation_with_images_is_split_between_prompts(tmp_path: Path) -> None:
    completions = {}
    for limit in (99, 4):
        given = options("llava_next", "full") | {"rollout_func": None, "top_k": 1, "max_steps": 1}
        trainer = make(ExactGRPOTrainer, tmp_path, **given)

        def within_memory(module: Any, args: Any, given: Any, limit: int = limit) -> None:
            if not torch.is_grad_enabled() and given.get(CACHE) and len(given["input_ids"]) > limit:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

        trainer.model.register_forward_pre_hook(within_memory, with_kwargs=True)
        record = train(trainer)
        completions[limit] = list(trainer._logs["completion"])
    assert record.logs[0]["update/oom_retries"] == 2
    assert completions[99] == completions[4]


@pytest.mark.parametrize("rollout", [Rollout(), Rollout(prioritize=True)], ids=["TRL's order", "prioritize"])
def test_a_generation_opens_and_prepares_an_image_once(tmp_path: Path, rollout: Rollout, monkeypatch: Any) -> None:
    """The processor has it twice, for generation and for the update, of four completions."""
    given = options("qwen2_vl", "full") | {"rollout_func": None, "max_steps": 4, "num_iterations": 2}
    rows = list(given["train_dataset"])
    for place, row in enumerate(rows):
        row["images"][0].save(tmp_path / f"{place}.png")
    paths = [{"prompt": row["prompt"], "images": [f"{place}.png"]} for place, row in enumerate(rows)]
    view, opened = View(given["processing_class"], str(tmp_path), None, None), list[str]()
    show = view.show

    def noted(name: str) -> Any:
        opened.append(name)
        return show(name)

    view.show = noted  # type: ignore[method-assign]
    kind = type(given["processing_class"].image_processor)
    prepared = Mock(side_effect=kind.__call__)
    monkeypatch.setattr(kind, "__call__", lambda self, images, **options: prepared(self, images, **options))
    given |= {"train_dataset": Dataset.from_list(paths), "view": view, **FOUR, "log_completions": True}
    trainer = make(ExactGRPOTrainer, tmp_path, rollout=rollout, keep_columns=True, **given)
    logs = train(trainer).logs
    assert len(opened) == 2 * 16 // 4, "two generations of four prompts, each used for two steps of four slices"
    assert len(set(opened[:4])) == len(set(opened[4:])) == 4
    assert [len(call.args[1]) for call in prepared.call_args_list] == [4] * 2 * 2
    assert [log["time/data"] > 0 for log in logs] == [True, False, True, False]
    assert len(list((tmp_path / "completions" / "images").iterdir())) == len(set(opened))
