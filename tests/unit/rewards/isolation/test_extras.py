"""A line for a package of an extra that is not installed, wherever it is missing."""

import tomllib
from collections.abc import Callable

import pytest
from omegaconf import DictConfig

from grpo.cli import missing_package
from grpo.config.schema import ROOT
from grpo.data import task
from grpo.utils.errors import ConfigError
from rewards.isolation.extras import MAKE, not_installed
from rewards.isolation.loader import what_and_where

JUDGE = "the package openai is not installed: `make extras`, or pip install 'grpo-trainer[judge]'"


def test_extras_are_named_with_how_to_install_them() -> None:
    assert not_installed("openai.types.chat") == JUDGE
    assert not_installed("reasoning_gym") == JUDGE.replace("openai", "reasoning_gym").replace("judge", "reasoning-gym")
    assert not_installed("torchvision") == (
        "the package torchvision is not installed: pip install 'grpo-trainer[images]'"
    )
    assert not_installed("vllm.engine") == (
        "the package vllm is not installed: `make vllm`, or pip install 'grpo-trainer[vllm]'"
    )
    assert not_installed("torch") is None
    assert not_installed("not_there") is None
    assert not_installed(None) is None


def test_make_extras_installs_the_extras_that_it_is_said_to() -> None:
    by_make = (ROOT / "Makefile").read_text().split("-e '.[judge")[1].split("]")[0].split(",")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {*MAKE} == extras.keys() - {*by_make, "judge", "smollm2"}


def test_rewards_data_and_commands_have_the_same_line(
    composed: Callable[..., DictConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = ModuleNotFoundError("No module named 'openai'", name="openai")
    assert what_and_where(error) == missing_package(error) == JUDGE
    monkeypatch.setitem(task.importlib.sys.modules, "reasoning_gym", None)
    with pytest.raises(
        ConfigError, match=r"the package reasoning_gym is not installed: `make extras`, or pip install '"
    ):
        task.load_split(composed("task=reasoning_gym").task, "train", 2)
