"""Train a policy with GRPO: `python -m grpo.train [+gpu=rtx3080] [group=choice] [group.key=value]`.

Compose, check, load, evaluate, train, evaluate, save. Libraries that take seconds to import wait until the
configuration is known to be well formed.
"""

import os
import sys
from pathlib import Path
from typing import NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from grpo.check import check, explain
from grpo.config import ROOT, ConfigError, RunError, register
from grpo.resume import continue_interrupted

WANTS_TRACEBACK = "HYDRA_FULL_ERROR" in os.environ


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
        leave(error)  # at once: Hydra would print a line of its own


def leave(error: Exception) -> NoReturn:
    """Say in one line on stderr what was wrong and exit: with 2 for wrong input, else with the run's status."""
    if isinstance(error, HydraException | OmegaConfBaseException):
        message, status = explain(error), 2
    elif isinstance(error, ConfigError):
        message, status = str(error), 2
    elif isinstance(error, RunError):
        message, status = str(error), error.status
    elif isinstance(error, OSError):
        message, status = f"cannot write the run directory: {error}; choose another with hydra.run.dir=…", 2
    else:
        message, status = f"{type(error).__name__}: {error}", 1
    print(f"grpo.train: {message}", file=sys.stderr)
    sys.exit(status)


def main() -> None:
    """Run the command line. With HYDRA_FULL_ERROR=1 errors come with their traceback."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises, instead of printing and leaving
    sys.argv[1:] = continue_interrupted(sys.argv[1:])
    register()
    try:
        job()
    except BrokenPipeError:  # whoever read the output has closed it, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        leave(RunError("interrupted before the training began", status=130))
    except Exception as error:
        if WANTS_TRACEBACK:
            raise
        leave(error)


if __name__ == "__main__":
    main()
