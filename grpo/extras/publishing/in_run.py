"""`train.push_to_hub` in a run, with transformers' options: uploads weights and tokenizer, at each save and at the end.

transformers' trainer would upload its whole output directory, which here has the log, completions and configuration.
"""

import logging
import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from omegaconf import DictConfig
from transformers import TrainerCallback, TrainerState

from grpo.extras.publishing.hub import reason, upload
from grpo.extras.publishing.model_card import model_card
from grpo.rundir.run_dir import read_run
from grpo.utils.atomic import remove

log = logging.getLogger(__name__)
STATE = ["*.pt", "*.pth", "*.bin", "trainer_state.json", "manifest.json", "README.md"]
"""Files of a checkpoint that are no part of the model."""


def pusher(trainer: Any, push: bool) -> TrainerCallback | None:
    """Return the callback that uploads checkpoints; None for a run that uploads none."""
    return Pusher() if push and trainer.args.hub_strategy != "end" else None


class Pusher(TrainerCallback):
    """Uploads each checkpoint in the background; a save during an upload is skipped without `hub_always_push`.

    A failed upload is a warning in the log; the upload of the result, at the end, would fail alike.
    """

    def __init__(self) -> None:
        self.uploads = ThreadPoolExecutor(max_workers=1)
        self.last: Future[None] | None = None

    def on_save(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        busy = self.last is not None and not self.last.done()
        if not state.is_world_process_zero or (busy and not args.hub_always_push):
            return
        name = f"checkpoint-{state.global_step}"
        checkpoint = Path(args.output_dir) / name
        linked = checkpoint.with_name(f"upload.partial-{name}")  # an older checkpoint may be deleted during its upload
        remove(linked)
        shutil.copytree(checkpoint, linked, copy_function=link)
        place = {"checkpoint": "last-checkpoint", "all_checkpoints": name}.get(str(args.hub_strategy.value))
        self.last = self.uploads.submit(self.upload, str(args.hub_model_id), linked, state.global_step, place)

    def upload(self, name: str, folder: Path, step: int, place: str | None) -> None:
        """Upload the model of a checkpoint and, into the folder `place` of the repository, all of the checkpoint."""
        message = f"Training in progress, step {step}"
        try:
            api = HfApi()
            api.upload_folder(repo_id=name, folder_path=folder, ignore_patterns=STATE, commit_message=message)
            if place:
                message += ", checkpoint"
                api.upload_folder(repo_id=name, folder_path=folder, path_in_repo=place, commit_message=message)
        except Exception as error:  # of the client, of its HTTP library
            log.warning("step %d was not uploaded to %s: %s", step, name, reason(error))
        finally:
            remove(folder)

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.uploads.shutdown()


def link(source: str, target: str) -> None:
    """Give a file a second name, or copy it where the file system has no such names."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def push_result(config: DictConfig, run_dir: Path) -> str:
    """Upload `model/` of a completed run, with its model card, and return the address.

    Raises:
        RunError: the upload failed; the folder is complete.
    """
    run = read_run(run_dir)
    (run.model / "README.md").write_text(model_card(run, merged=not config.peft))
    return upload(run.model, config.train.hub_model_id)
