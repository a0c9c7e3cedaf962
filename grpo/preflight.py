"""Forecast whether a run will learn: `python -m grpo.preflight`, with the command line of `grpo.train`.

It samples a few completions of training problems with the run's own policy, engine, rewards, tools and limits, and
reports whether the run can learn from them. Samples are kept: the same command continues after an interruption.
"""

import hashlib
import json
import logging
import signal
import sys
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from grpo.cli import WANTS_TRACEBACK, leave, quick_imports, start
from grpo.config.folders import config_flags
from grpo.config.messages import meant
from grpo.config.resolve import resolve
from grpo.config.schema import ROOT
from grpo.prepared import checked, planned, take_gpu
from grpo.rundir.files import write_json
from grpo.utils.distributed import is_launched
from grpo.utils.errors import ConfigError, RunError
from grpo.utils.hardware import check_gpu, check_pytorch_sees_gpu
from grpo.utils.spoken import shown
from grpo.utils.terminal import on_signals, plain_console

PROGRAM = "grpo.preflight"
FORMATS = ("text", "json")
MAX_SAMPLES = 64
"""Completions per problem, as many as the largest group of the report."""
NOT_DECISIVE = ("preflight.format=", "preflight.problems=", "plan.hourly_price=")
"""Overrides with which the same samples are used again."""
log = logging.getLogger(__name__)


@hydra.main(config_path=str(ROOT / "conf"), config_name="config", version_base="1.3")
def job(config: DictConfig) -> None:
    """Forecast a command line, and exit with status 1 if the run will probably not learn."""
    on_signals((signal.SIGTERM, signal.SIGHUP), signal.default_int_handler)
    folder = Path(HydraConfig.get().runtime.output_dir)
    try:
        content = forecast(config, list(HydraConfig.get().overrides.task), folder)
    except Exception as error:
        if WANTS_TRACEBACK:
            raise
        leave(error, PROGRAM)
    except KeyboardInterrupt:
        leave(RunError("interrupted; the same command continues", status=130), PROGRAM)
    if config.preflight.format == "json":
        print(json.dumps(content, indent=2))
    if not content["learns"]:
        sys.exit(1)


def forecast(config: DictConfig, overrides: list[str], folder: Path) -> dict[str, Any]:
    """Sample into a folder and return the report; print it if `preflight.format` is `text`.

    Raises:
        ConfigError: the input is wrong.
        RunError: sampling failed; the log has the traceback.
    """
    check_options(config.preflight)
    if is_launched():
        raise ConfigError("it samples in one process: start it without torchrun or accelerate")
    config, overrides = checked(config, overrides)
    plan = planned(config, overrides)
    take_gpu(config)
    if not config.train.use_cpu:
        check_pytorch_sees_gpu()
    if config.plan.enforce:
        check_gpu(config.gpu)
    with quick_imports():
        from grpo.extras.preflight.first_step import why_not_tried
        from grpo.extras.preflight.page import write_page
        from grpo.extras.preflight.report import report, weights_of
        from grpo.extras.preflight.sampling import for_sampling, sample
        from grpo.extras.preflight.text import show
    try:
        console = plain_console(file=sys.stderr)
        result = sample(resolve(for_sampling(config), plan), folder, console, why_not_tried(config))
    except (ConfigError, RunError):
        raise
    except Exception as error:
        log.exception("sampling failed")
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise RunError(f"failed: {reason}; the traceback is in {shown(folder / 'train.log')}", 2) from error
    content = report(result, config, overrides, plan, config_flags(HydraConfig.get()))
    write_json(folder / "preflight.json", content)
    page = write_page(folder, content, result.problems, weights_of(config), config.task.eval.reward)
    if config.preflight.format == "text":
        show(content, plain_console())
        print(f"page: {shown(page)}")
    return content


def check_options(options: DictConfig) -> None:
    """Check the group `preflight`.

    Raises:
        ConfigError: a value is impossible.
    """
    if options.format not in FORMATS:
        raise ConfigError(f"preflight.format={options.format}: unknown{meant(options.format, FORMATS)}")
    if not 2 <= options.samples <= MAX_SAMPLES:
        raise ConfigError(f"preflight.samples={options.samples}: completions per problem, 2 to {MAX_SAMPLES}")
    if options.problems < 2:
        raise ConfigError(f"preflight.problems={options.problems}: at least 2, as a forecast compares problems")


def command_line(arguments: list[str]) -> list[str]:
    """Return the command line with a directory that follows from it, so that the same command continues."""
    if any(word.lstrip("+").startswith("hydra.run.dir=") for word in arguments):
        return arguments
    decisive = sorted(word for word in arguments if not word.startswith(NOT_DECISIVE))
    digest = hashlib.sha256(repr(decisive).encode()).hexdigest()[:8]
    return [*arguments, f"hydra.run.dir=outputs/preflight/{digest}"]


def main() -> None:
    """Run the command line."""
    if not {"-m", "--multirun"}.isdisjoint(sys.argv):
        leave(ConfigError("-m: it forecasts one command line at a time"), PROGRAM)
    sys.argv[1:] = command_line(sys.argv[1:])
    start(job, PROGRAM)


if __name__ == "__main__":
    main()
