"""The common beginning of the commands that run or plan a command line: its processes, checks, plan and GPU."""

import sys

from omegaconf import DictConfig

from grpo.cli import check_can_train
from grpo.config.check import check, check_shard
from grpo.config.data_files import check_files
from grpo.extras.environments.taskset import with_taskset
from grpo.extras.guard.check import check_guard
from grpo.launching.processes import with_processes, without_shard
from grpo.planning.advice import advise
from grpo.planning.duration import expected_duration
from grpo.planning.fit import Plan, make_plan
from grpo.utils.distributed import is_main_process
from grpo.utils.errors import ConfigError
from grpo.utils.hardware import take_one_gpu


def checked(
    config: DictConfig, overrides: list[str], loads: bool = True, starts: bool = True
) -> tuple[DictConfig, list[str]]:
    """Return a checked configuration and its overrides, with the number of processes and the rewards of its taskset.

    Args:
        config: as composed.
        overrides: of the command line.
        loads: whether this command loads the libraries and the data of a training.
        starts: whether it starts, or plans, as many processes as the run has.

    Raises:
        ConfigError: the first problem.
    """
    if loads:
        check_can_train()
    if starts:
        config, overrides = with_processes(config, overrides)
    config, overrides = with_taskset(config, overrides)
    config = without_shard(config)
    check(config)
    check_guard(config)
    if config.train.push_to_hub:
        from grpo.extras.publishing.check import check_push  # its library takes a third of a second

        check_push(config)
    if starts:
        check_shard(config)
    if loads:
        check_files(config.task)
    return config, overrides


def planned(config: DictConfig, overrides: list[str]) -> Plan | None:
    """Return the plan of a run; None if it is not wanted and cannot be made.

    Raises:
        ConfigError: it does not fit, with changes that help.
    """
    try:
        plan = make_plan(config)
    except ConfigError:
        if config.plan.enforce:
            raise
        return None
    if plan.problem and config.plan.enforce:
        tries = [
            f"{' '.join(change['overrides'])} ({change['peak_gb']:.1f} GiB)"
            for change in advise(overrides, config, plan)
        ]
        advice = f"try {', or '.join(tries)}; " if tries else ""
        raise ConfigError(
            f"does not fit: {plan.problem}; {advice}`python -m grpo.plan` with the same arguments reports more, and "
            "plan.enforce=false runs it anyway"
        )
    by_time = config["update"].compile == "auto" and not plan.unified  # a CPU's speed would be measured for nothing
    if by_time and (duration := expected_duration(config, plan)):
        plan.settings["update.compile"] = duration.compiles
    return plan


def take_gpu(config: DictConfig) -> None:
    """Take one GPU of this machine for this process, and print which."""
    if not config.train.use_cpu and (taken := take_one_gpu()):
        print(taken, file=sys.stderr)
    if config.gpu is not None and config.gpu.found and is_main_process():
        print(config.gpu.found, file=sys.stderr)
