"""Commands that plan the run of another trainer here."""

import json
import shlex
from pathlib import Path
from typing import Any

from grpo.cli import quoted
from grpo.extras.doctor.read import checkpoints


def commands(path: Path, config: Path | None) -> list[str]:
    """Return the commands that plan a run here: of its configuration, or of the model beside its logs; else none.

    `training_args.bin` has the configuration too, as a pickle, which could run code and is not read.
    """
    if config:
        file = shlex.quote(str(config))
        experiment = f"+experiment={config.stem}"
        plan = shlex.join(["python", "-m", "grpo.plan", "--config-dir", ".", "+gpu=any", experiment])
        return [f"python -m grpo.from_trl {file} && {plan}"]
    folder = path if path.is_dir() else path.parent
    for place in (folder, *checkpoints(folder)):
        adapter, model = content(place / "adapter_config.json"), content(place / "config.json")
        words = []
        if isinstance(name := adapter.get("base_model_name_or_path"), str):
            words = [f"model.model_name_or_path={quoted(name)}", "peft=lora"]
            words += [f"peft.r={adapter['r']}"] if isinstance(adapter.get("r"), int) else []
        elif "model_type" in model:
            words = [f"model.model_name_or_path={quoted(str(place.absolute()))}", "peft=none"]
        if words:
            return [shlex.join(["python", "-m", "grpo.plan", "+gpu=any", *words])]
    return []


def content(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file; an empty dictionary without it, or if it is torn."""
    try:
        loaded = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return loaded if isinstance(loaded, dict) else {}
