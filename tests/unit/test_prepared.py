"""The common beginning of the commands."""

from collections.abc import Callable

import pytest
from omegaconf import DictConfig

from grpo.prepared import planned
from grpo.utils.errors import ConfigError

TOO_LARGE = ["+gpu=rtx3080", "model=llama3_1_8b"]


def test_a_run_that_does_not_fit_ends_with_changes_that_help(composed: Callable[..., DictConfig]) -> None:
    with pytest.raises(ConfigError, match=r"does not fit: .*try peft=qlora .*plan\.enforce=false runs it anyway"):
        planned(composed(*TOO_LARGE), TOO_LARGE)


def test_a_run_that_need_not_fit_goes_on_with_its_plan(composed: Callable[..., DictConfig]) -> None:
    plan = planned(composed(*TOO_LARGE, "plan.enforce=false"), TOO_LARGE)
    assert plan is not None
    assert plan.problem
