"""Ranges of machines: `launch.nodes=2:4`."""

import os
from collections.abc import Callable
from unittest import mock

import pytest
from omegaconf import DictConfig

from grpo.config.batch import completions, node_range, processes
from grpo.config.check import check
from grpo.launching.processes import with_processes
from grpo.utils.distributed import BY_US
from grpo.utils.errors import ConfigError

RANGE = ("launch.nodes=2:4", "launch.processes=2", "train.gradient_accumulation_steps=6")


def among(nodes: int, config: DictConfig, launched_by: dict[str, str]) -> tuple[DictConfig, list[str]]:
    """What one of the processes takes for its configuration, if there are so many machines."""
    world = {"GROUP_WORLD_SIZE": str(nodes), "WORLD_SIZE": str(2 * nodes), "RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    with mock.patch.dict(os.environ, world | launched_by):
        return with_processes(config, [])


def test_a_range_is_planned_with_the_least_machines(composed: Callable[..., DictConfig]) -> None:
    config, _ = with_processes(composed(*RANGE), [])
    check(config)
    assert node_range(config) == (2, 4)
    assert processes(config) == 4


@pytest.mark.parametrize("more", [[], ["train.steps_per_generation=12"], ["train.generation_batch_size=192"]])
def test_a_step_has_as_many_completions_on_each_number(composed: Callable[..., DictConfig], more: list[str]) -> None:
    config = composed(*RANGE, *more)
    batches = set()
    for nodes in (2, 3, 4):
        there, overrides = among(nodes, config, {BY_US: "run"})
        assert there.launch.nodes == nodes
        assert f"launch.nodes={nodes}" in overrides
        train = there.train
        step = train.per_device_train_batch_size * train.gradient_accumulation_steps * 2 * nodes
        batches.add((step, completions(train, 2 * nodes)))
    assert len(batches) == 1


@pytest.mark.parametrize("nodes", ["4:2", "0:2", "0", "2:", "2:3:4", "two", "2.5", "-1"])
def test_what_is_no_range_is_one_line(composed: Callable[..., DictConfig], nodes: str) -> None:
    with pytest.raises(ConfigError, match=r"launch.nodes=.*: a positive number of machines, or the least and the most"):
        with_processes(composed(f"launch.nodes={nodes}"), [])


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["train.gradient_accumulation_steps=8"], r"no multiple of 6.*: train.gradient_accumulation_steps=12$"),
        (["train.steps_per_generation=7"], r"no multiple of 6.*: train.steps_per_generation=12$"),
        (
            ["train.per_device_train_batch_size=8", "train.generation_batch_size=64"],
            r"with 3 of them, 6 processes cannot share",
        ),
        (["train.per_device_train_batch_size=1", "train.num_generations=6"], r"with 3 of them, a process generates 4"),
        (["plan.processes=4"], r"plan.processes=4: leave one of them out"),
        (["train.resume_from_checkpoint=outputs/run"], r"use train.resume_from_checkpoint=auto"),
    ],
)
def test_a_batch_that_cannot_be_kept_is_one_line(
    composed: Callable[..., DictConfig], more: list[str], says: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^launch.nodes=2:4.*{says}"):
        check(composed(*RANGE, *more))


def test_torchrun_has_no_range_of_ours(composed: Callable[..., DictConfig]) -> None:
    with pytest.raises(ConfigError, match=r"launch.nodes=2:4: 6 processes have been started already"):
        among(3, composed(*RANGE), {})
