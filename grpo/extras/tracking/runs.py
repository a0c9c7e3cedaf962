"""The run of a training at W&B and trackio: named after its directory, and continued by a resumed training.

Both begin a second run otherwise. W&B continues by an id, which `tracking.json` of the run directory has, and trackio
by the name. The jobs of a sweep are a group at W&B. Variables and options that the user has set take precedence.
"""

import os
import uuid
from pathlib import Path
from typing import Any

from grpo.rundir.files import read_json, write_json
from grpo.rundir.sweep_dir import is_sweep

FILE = "tracking.json"


def tracked(trainer: Any) -> None:
    """Have W&B and trackio name and continue the run of a trainer; there is no callback to add."""
    args = trainer.args
    services = {"wandb", "trackio"} & {*args.report_to}
    if not (services and args.should_log):
        return
    folder = Path(args.output_dir).resolve()
    sweep = folder.parent if is_sweep(folder.parent) else None
    if args.run_name in (None, args.output_dir):
        args.run_name = "/".join(folder.parts[-3 if sweep else -2 :])
    if "wandb" in services:
        ids = read_json(folder / FILE)
        if "wandb" not in ids:
            ids["wandb"] = uuid.uuid4().hex[:8]
            write_json(folder / FILE, ids)
        os.environ.setdefault("WANDB_RUN_ID", ids["wandb"])
        os.environ.setdefault("WANDB_RESUME", "allow")
        os.environ.setdefault("WANDB_DIR", str(folder))
        if sweep:
            os.environ.setdefault("WANDB_RUN_GROUP", "/".join(sweep.parts[-2:]))
