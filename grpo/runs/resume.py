"""Which checkpoint to continue from: a partly written one is never taken for a complete one."""

import json
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path

import yaml
from safetensors import SafetensorError, safe_open

from grpo.errors import ConfigError

KEY = "train.resume_from_checkpoint"
NOT_ESSENTIAL = re.compile(rf"[+~]*(hydra[./]|{KEY}=)")
"""Of a command line: Hydra's own options, and the checkpoint to resume from."""


def is_complete(checkpoint: Path) -> bool:
    """Return whether every file of a checkpoint is there to its end. The Trainer writes `trainer_state.json` last."""
    try:
        step = json.loads((checkpoint / "trainer_state.json").read_text())["global_step"]
        weights = list(checkpoint.glob("*.safetensors"))
        for file in weights:
            with safe_open(file, framework="np"):  # checks the length of the file against its header
                pass
    except (OSError, ValueError, KeyError, SafetensorError):
        return False
    pickles = [*checkpoint.glob("*.pt"), *checkpoint.glob("*.pth")]
    return (
        checkpoint.name == f"checkpoint-{step}"
        and bool(weights)
        and (checkpoint / "optimizer.pt").exists()
        and all(zipfile.is_zipfile(file) for file in pickles)  # a zip ends with its table of contents
    )


def newest_checkpoint(run_dir: Path) -> Path | None:
    """Return the complete checkpoint with the most steps in a run directory."""
    found = [path for path in run_dir.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    complete = (path for path in sorted(found, key=lambda path: int(path.name[11:]), reverse=True) if is_complete(path))
    return next(complete, None)


def resolve(resume_from: str | bool | None, run_dir: Path) -> Path | None:
    """Return the checkpoint to continue from.

    Args:
        resume_from: `auto` or, as transformers has it, true (None if there is none yet); a run directory; a checkpoint.
        run_dir: where `auto` looks.

    Raises:
        ConfigError: a directory was named and there is no complete checkpoint in it.
    """
    if not resume_from:
        return None
    if resume_from in ("auto", True):
        return newest_checkpoint(run_dir)
    named = Path(str(resume_from))
    checkpoint = named if is_complete(named) else newest_checkpoint(named)
    if checkpoint is None:
        what = "no complete checkpoint in it" if named.is_dir() else "there is no such directory"
        raise ConfigError(f"{KEY}={resume_from}: {what}; name a run directory or one of its checkpoint-* folders")
    return checkpoint


def interrupted_run(overrides: list[str], outputs: Path = Path("outputs")) -> Path | None:
    """Return the newest run directory in `outputs/*/*` of a run with these overrides that has not been completed."""
    for hydra_dir in sorted(outputs.glob("*/*/.hydra"), reverse=True):
        run_dir = hydra_dir.parent
        try:
            same = yaml.safe_load((hydra_dir / "overrides.yaml").read_text())
            summary = run_dir / "summary.json"
            status = json.loads(summary.read_text())["status"] if summary.exists() else "killed"
        except (OSError, ValueError, KeyError, yaml.YAMLError):
            continue
        if status != "completed" and essential(same) == essential(overrides) and newest_checkpoint(run_dir):
            return run_dir
    return None


def essential(overrides: Sequence[str]) -> list[str]:
    """Return what makes two command lines the same run: all but Hydra's own options and the checkpoint."""
    return sorted(text for text in overrides if not NOT_ESSENTIAL.match(text))


def continue_interrupted(arguments: list[str]) -> list[str]:
    """For `train.resume_from_checkpoint=auto`, add the directory of the interrupted run, so that it continues there.

    The command line comes back unchanged if a run directory is named in it or if there is no such run.
    """
    overrides = [text for text in arguments if ("=" in text or text.startswith("~")) and not text.startswith("-")]
    if {f"{KEY}=auto", f"{KEY}=true"} & set(overrides) and not any(
        text.startswith("hydra.run.dir=") for text in overrides
    ):
        run_dir = interrupted_run(overrides)
        if run_dir:
            return [*arguments, f"hydra.run.dir={run_dir}"]
    return arguments
