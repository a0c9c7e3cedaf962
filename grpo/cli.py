"""Common code of the commands: one-line errors on stderr, and exit statuses."""

import contextlib
import gc
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError

from grpo.config.folders import WITHOUT_FLAG, check_names, config_folders
from grpo.config.messages import check_flags, explain, of_resolver, of_yaml
from grpo.config.schema import register
from grpo.config.secrets import refuse_secrets
from grpo.rundir.directory import check_no_run
from grpo.rundir.lock import new_directory
from grpo.rundir.storage import WITHOUT_NAME
from grpo.utils.distributed import check_launcher, is_first_to_fail, log_name
from grpo.utils.errors import ConfigError, RunError, described
from grpo.utils.hardware import visible_gpus
from grpo.utils.patching import patched
from grpo.utils.terminal import keep
from rewards.isolation.extras import not_installed
from rewards.isolation.process import check_system

WANTS_TRACEBACK = "HYDRA_FULL_ERROR" in os.environ


def leave(error: Exception, program: str) -> NoReturn:
    """Print a one-line error on stderr and exit: with status 2 for wrong input, otherwise with the run's status.

    Of several processes only the first that fails prints it.
    """
    if isinstance(error, HydraException | OmegaConfBaseException):
        message, status = str(of_resolver(error) or explain(error)), 2
    elif isinstance(error, MarkedYAMLError):
        message, status = of_yaml(error), 2
    elif isinstance(error, ConfigError):
        message, status = str(error), 2
    elif isinstance(error, RunError):
        message, status = str(error), error.status
    elif isinstance(error, AssertionError) and "Unexpected type for root" in str(error):  # of OmegaConf, at a None
        message, status = "gpu.…: there is no GPU profile to change; append one, +gpu=any or one for the GPU", 2
    elif isinstance(error, ValueError) and "Config group override must be" in str(error):  # of Hydra
        message, status = "a choice is a name, neither true nor false nor a number; --help lists the choices", 2
    elif isinstance(error, OSError) and (error.filename or error.errno in WITHOUT_NAME):
        where = error.filename or "the run directory"
        message, status = f"cannot use {where}: {error.strerror}; hydra.run.dir=… chooses another run directory", 2
    elif missing := missing_package(error):
        message, status = missing, 2
    else:
        message, status = f"{type(error).__name__}: {error}" if str(error) else described(error), 1
    if is_first_to_fail(message):
        print(f"{program}: {message}", file=sys.stderr)
    sys.exit(status)


def check_can_train() -> None:
    """Raise a ConfigError unless this system can train and evaluate."""
    try:
        check_system()
    except ValueError as error:
        raise ConfigError(str(error)) from error


def quoted(text: str) -> str:
    """Return a text as a quoted value of Hydra's override grammar."""
    return QuotedString(text, Quote.single).with_quotes()


class RefuseSecrets(Callback):
    """Hydra's callback: ends a command before anything is written: with a secret, or in the directory of a run."""

    program = "grpo"

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        try:
            refuse_secrets(config, OmegaConf.to_container(config.hydra.overrides.task))  # type: ignore[arg-type]
            check_names(config)
            if self.program != "grpo.train":  # which may continue it
                check_no_run(config.hydra.run)
        except ConfigError as error:
            leave(error, self.program)

    on_multirun_start = on_run_start


def missing_package(error: BaseException | None) -> str | None:
    """Return a line about the package whose absence led to an exception, also inside a library; None if none did."""
    while error and not isinstance(error, ModuleNotFoundError):
        error = error.__cause__ or error.__context__
    if not (isinstance(error, ModuleNotFoundError) and error.name):
        return None
    importers = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    by_vllm = any(name.partition(".")[0] == "vllm" for name in importers)
    if not by_vllm and (text := not_installed(error.name)):
        return text
    needs, command = ("vLLM needs it", "make vllm") if by_vllm else ("this project needs it", "make install")
    return f"the package {error.name.partition('.')[0]} is not installed, and {needs}: `{command}` installs it"


def register_resolvers() -> None:
    """Tell OmegaConf the directory of a new run, and the values that `conf/hydra/launcher` takes from this machine.

    `${visible_gpus:}` is a number, `${jobs_at_once:}` at least 1, and `${gpus_per_job:cluster}` is 1 on the nodes of a
    cluster, whatever this machine has.
    """

    def gpus() -> int:  # only a sweep with a launcher asks the driver
        return len(visible_gpus())

    OmegaConf.register_new_resolver("new_run_directory", new_directory, replace=True)
    OmegaConf.register_new_resolver("log_name", log_name, replace=True)
    OmegaConf.register_new_resolver("visible_gpus", gpus, replace=True)
    OmegaConf.register_new_resolver("jobs_at_once", lambda: max(1, gpus()), replace=True)
    OmegaConf.register_new_resolver("gpus_per_job", lambda cluster: 1 if cluster else min(1, gpus()), replace=True)


def start(job: Callable[[], object], program: str) -> None:
    """Run a Hydra job as a command line. With HYDRA_FULL_ERROR=1 errors come with their traceback."""
    keep(2)
    try:
        check_launcher()
    except ConfigError as error:
        print(f"{program}: {error}", file=sys.stderr)  # `leave` would ask the other processes
        sys.exit(2)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises, instead of printing and leaving
    logging.raiseExceptions = False  # a log on a full disk is no reason for a traceback on the terminal
    register()
    register_resolvers()
    RefuseSecrets.program = program
    try:
        check_flags(sys.argv[1:])
        sys.argv[1:] = sorted(sys.argv[1:], key=lambda word: word not in ("-m", "--multirun"))  # behind overrides, too
        with (
            patched("hydra._internal.config_loader_impl:ConfigLoaderImpl.get_group_options", choices),
            patched("hydra._internal.hydra:Hydra.create_main_hydra2", partial(with_folders, Hydra.create_main_hydra2)),
            patched("argparse:ArgumentParser._check_help", lambda self, action: None)
            if sys.version_info >= (3, 14)
            else contextlib.nullcontext(),
        ):
            job()
    except BrokenPipeError:  # whoever read the output has closed it, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        leave(RunError("interrupted", status=130), program)
    except Exception as error:
        if WANTS_TRACEBACK:
            raise
        leave(error, program)


def with_folders(create: Callable[..., Hydra], task_name: str, config_search_path: ConfigSearchPath) -> Hydra:
    """Create Hydra with the folders that are found without `--config-dir`; the folder of that option comes first."""
    for folder in config_folders():
        config_search_path.prepend(WITHOUT_FLAG, f"file://{folder}", SearchPathQuery("schema"))
    return create(task_name, config_search_path)


def choices(
    self: ConfigLoaderImpl, group_name: str, results_filter: ObjectType = ObjectType.CONFIG, **options: Any
) -> list[str]:
    """Return the choices of a group for `--help`: Hydra's method copies all configurations for each, for seconds."""
    return self.repository.get_group_options(group_name, results_filter)


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Import libraries without garbage collection, and exempt their objects from later collections.

    A collection would find nothing, and take a quarter of the time.
    """
    # TRL 1.16 warns of each vLLM above 0.31; pyproject.toml has the versions that were tested
    warnings.filterwarnings("ignore", "TRL currently supports vLLM", UserWarning)
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")  # it logs where everything else does, of its start, too
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # in a second job of this process, what the first one has left would stay, too
            gc.freeze()
        gc.enable()


@contextlib.contextmanager
def output_in(file: Path) -> Iterator[None]:
    """Send the prints and warnings of libraries to Hydra's log, so that the terminal shows only the run."""
    import datasets
    import transformers

    for library in (transformers, datasets):
        library.utils.logging.disable_progress_bar()
        library.utils.logging.enable_propagation()
    transformers.utils.logging.disable_default_handler()
    logging.getLogger("datasets").handlers.clear()  # the first one prints on the terminal
    logging.captureWarnings(True)
    with file.open("a", buffering=1) as stream, contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        yield
