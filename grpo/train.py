"""Train a policy with GRPO: `python -m grpo.train [+gpu=rtx3080] [group=choice] [group.key=value]`.

Compose, check, load, evaluate, train, evaluate, save. Libraries that take seconds to import wait until the
configuration is known to be well formed.
"""

import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from grpo.check import check
from grpo.cli import WANTS_TRACEBACK, leave, start
from grpo.config import ROOT, ConfigError, RunError
from grpo.resume import continue_interrupted

PROGRAM = "grpo.train"


@hydra.main(config_path=str(ROOT / "conf"), config_name="config", version_base="1.3")
def job(config: DictConfig) -> float | None:
    """Run one job of a command line; return the held-out accuracy after training."""
    hydra_config = HydraConfig.get()
    try:
        check(config)
        from grpo.run import run

        summary = run(config, Path(hydra_config.runtime.output_dir))
        if summary["status"] == "stopped":
            again = "train.resume_from_checkpoint=auto continues it"
            raise RunError(f"stopped: {summary['reason']}; {again}", status=130)
        return summary["accuracy_after"]
    except (ConfigError, RunError) as error:
        if hydra_config.mode == RunMode.MULTIRUN or WANTS_TRACEBACK:
            raise
        leave(error, PROGRAM)  # at once: Hydra would print a line of its own


def main() -> None:
    """Run the command line."""
    sys.argv[1:] = continue_interrupted(sys.argv[1:])
    start(job, PROGRAM)


if __name__ == "__main__":
    main()
