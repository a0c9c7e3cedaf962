"""Train a policy with GRPO: `python -m grpo.train [+gpu=rtx3080] [group=choice] [group.key=value]`.

Compose, check, plan, load, evaluate, train, evaluate, save. Libraries that take seconds to import wait until the
configuration is known to be well formed.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from grpo.cli import WANTS_TRACEBACK, leave, quick_imports, start
from grpo.config.batch import node_range
from grpo.config.check import check_deepspeed, check_report_to
from grpo.config.check_rewards import check_files_of_rewards
from grpo.config.facts import generator_of
from grpo.config.resolve import resolve
from grpo.config.schema import ROOT
from grpo.launching.causes import STOPPED
from grpo.launching.elastic import launch
from grpo.launching.processes import check_processes
from grpo.launching.rendezvous import choose_directory, has_several, is_first
from grpo.prepared import checked, planned, take_gpu
from grpo.rundir.files import write_json
from grpo.rundir.lock import take
from grpo.rundir.resume import check_named, how_to_continue
from grpo.sweeps.callback import recorded
from grpo.sweeps.job import PROGRAM, run_job
from grpo.utils.distributed import (
    BY_US,
    agreed,
    choose_interface,
    end_silent_connections,
    has_other_machines,
    is_launched,
    is_main_process,
    restarts,
)
from grpo.utils.errors import ConfigError, RunError
from grpo.utils.hardware import check_gpu, check_pytorch_sees_gpu, use_expandable_segments
from grpo.utils.terminal import keep, on_signals, plain_console
from grpo.utils.waiting import Waiting
from rewards.isolation.system import end_with_parent


@hydra.main(config_path=str(ROOT / "conf"), config_name="config", version_base="1.3")
def job(config: DictConfig) -> float | None:
    """Run a job of a command line; return the held-out accuracy after training."""
    hydra_config = HydraConfig.get()
    if hydra_config.mode == RunMode.MULTIRUN:
        return run_job(config, hydra_config)
    heard = on_signals((signal.SIGTERM, signal.SIGHUP), signal.default_int_handler)  # until the run takes them over
    run_dir = Path(hydra_config.runtime.output_dir)
    try:
        summary = start_run(config, run_dir, list(hydra_config.overrides.task))
        if summary["status"] == "stopped":
            if BY_US in os.environ and is_launched():  # the process that has started this one says it
                sys.exit(STOPPED)
            raise RunError(f"stopped: {summary['reason']}; {how_to_continue(run_dir)}", status=STOPPED)
        return summary["accuracy_after"]
    except KeyboardInterrupt:
        if is_main_process() and not (run_dir / "summary.json").exists():  # else a run has written its own
            write_json(run_dir / "summary.json", {"status": "stopped", "reason": "interrupted while starting"})
        leave(RunError(f"interrupted; {how_to_continue(run_dir)}", status=STOPPED), PROGRAM)
    except Exception as error:
        if WANTS_TRACEBACK:
            raise
        leave(error, PROGRAM)  # at once: Hydra would print a line of its own
    finally:  # the outcome is written: an interrupt would only end a destructor, with a traceback
        on_signals(tuple(heard), signal.SIG_IGN)


def start_run(config: DictConfig, run_dir: Path, overrides: list[str]) -> dict[str, Any]:
    """Check, take the directory, plan, prepare the GPU and run; return the content of `summary.json`.

    Raises:
        ConfigError: the input is wrong, the run does not fit, or the directory belongs to another run.
        RunError: the run failed.
    """
    if config.sweep.resume:
        raise ConfigError(
            "sweep.resume=true: a sweep is run with -m; a run resumes with train.resume_from_checkpoint=auto"
        )
    config, overrides = checked(config, overrides)
    check_processes(config)
    check_deepspeed(config.train)
    check_report_to(config.train)
    check_files_of_rewards(config.reward)
    if is_main_process() and BY_US not in os.environ and (is_launched() or is_first(config)):  # else another has it
        take(run_dir)
    if has_several(config) or has_other_machines():
        end_silent_connections(config.launch.timeout / 3)
    if config.launch.processes * node_range(config)[1] > 1 and not is_launched():
        planned(config, overrides)
        check_named(config.train.resume_from_checkpoint)
        if not WANTS_TRACEBACK:  # Hydra's variable, which this process has set for itself
            os.environ.pop("HYDRA_FULL_ERROR", None)
        return launch(config, run_dir, PROGRAM)
    if config.train.push_to_hub:
        from grpo.extras.publishing.check import prepare_push

        agreed("the hub", lambda: prepare_push(config))
    take_gpu(config)
    plan = planned(config, overrides)
    settings = resolve(config, plan)
    check_named(config.train.resume_from_checkpoint)
    if not config.train.use_cpu:
        prepare_gpu(settings.train)
    if config.plan.enforce:
        check_gpu(config.gpu)
    console = plain_console(file=sys.stderr, quiet=not is_main_process())
    with quick_imports(), Waiting(console, "loading libraries"):
        from grpo.run.session import run

    summary = run(settings, run_dir, plan)
    if config.train.push_to_hub and summary["status"] == "completed" and is_main_process():
        from grpo.extras.publishing.in_run import push_result

        console.print(push_result(config, run_dir), soft_wrap=True)
    return summary


def prepare_gpu(train: DictConfig) -> None:
    """Configure PyTorch's allocator for a resolved configuration, and check that PyTorch can use the GPU.

    Raises:
        ConfigError: it cannot.
    """
    if expands(train):
        use_expandable_segments()
    check_pytorch_sees_gpu()


def expands(train: DictConfig) -> bool:
    """Return whether a resolved run can use expandable memory.

    The memory pool of a sleeping vLLM refuses it, and so does vLLM's custom all-reduce over several GPUs: CUDA cannot
    export such memory to another process (https://github.com/vllm-project/vllm/issues/42609).
    """
    return not (
        generator_of(train) == "colocated" and (train.vllm_enable_sleep_mode or train.vllm_tensor_parallel_size > 1)
    )


def main() -> None:
    """Run the command line."""
    keep(1, 2)  # also the table at the end of a run, and of a sweep
    if is_launched():
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP warns of what is no fault here
        choose_interface()
        if BY_US in os.environ:
            end_with_parent(signal.SIGTERM)  # it does not outlive who has started it
        if restarts() and is_main_process():
            print(f"{PROGRAM}: a process has died; restart {restarts()} of all", file=sys.stderr)
    with recorded(choose_directory):
        start(job, PROGRAM)


if __name__ == "__main__":
    main()
