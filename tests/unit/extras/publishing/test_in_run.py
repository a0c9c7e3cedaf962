"""Uploads in a training: while one is under way, and files that are deleted meanwhile."""

import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import HfApi
from transformers import TrainerControl, TrainerState, TrainingArguments

from grpo.extras.publishing.in_run import Pusher, pusher


@pytest.mark.parametrize(("always", "steps"), [(False, [1, 3]), (True, [1, 2, 3])])
def test_a_save_during_an_upload_is_skipped(
    always: bool, steps: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, uploaded = threading.Event(), []

    def upload_folder(self: HfApi, folder_path: Path, commit_message: str, **options: Any) -> None:
        assert go_on.wait(60)
        uploaded.append((commit_message, (folder_path / "model.safetensors").read_text()))

    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    args = TrainingArguments(str(tmp_path), hub_model_id="me/run", hub_always_push=always, use_cpu=True)
    pusher, control = Pusher(), TrainerControl()

    def save(step: int) -> None:
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "model.safetensors").write_text(f"weights {step}")
        pusher.on_save(args, TrainerState(global_step=step), control)
        shutil.rmtree(folder)  # as `save_total_limit` does

    save(1)
    save(2)
    go_on.set()
    assert pusher.last is not None
    pusher.last.result(60)
    save(3)
    pusher.on_train_end(args, TrainerState(), control)
    assert uploaded == [(f"Training in progress, step {step}", f"weights {step}") for step in steps]
    assert not list(tmp_path.glob("*partial*"))


@pytest.mark.parametrize(
    ("push", "strategy", "pushes"), [(True, "end", False), (False, "every_save", False), (True, "every_save", True)]
)
def test_checkpoints_are_uploaded_where_the_strategy_says(
    push: bool, strategy: str, pushes: bool, tmp_path: Path
) -> None:
    args = TrainingArguments(str(tmp_path), hub_strategy=strategy, use_cpu=True)
    assert isinstance(pusher(SimpleNamespace(args=args), push), Pusher) == pushes
