"""The common beginning of the commands."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from omegaconf import DictConfig

from grpo.config.resolve import resolve
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


@pytest.mark.parametrize(("pays", "resolved"), [(False, False), (True, "auto"), (None, "auto")])
def test_a_plan_only_keeps_layers_from_being_compiled(
    composed: Callable[..., DictConfig], pays: bool | None, resolved: bool | str
) -> None:
    """Whether weights are sharded, by a DeepSpeed file for one, is the trainer's to know."""
    settings = {} if pays is None else {"update.compile": pays}
    plan = SimpleNamespace(settings=settings, here=True, unified=True, family=None)
    assert resolve(composed(), plan).update.compile == resolved
    assert resolve(composed("update.compile=true"), plan).update.compile is True


def test_a_run_on_a_cpu_does_not_measure_its_speed(
    composed: Callable[..., DictConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo.planning.duration.speed_of_cpu", lambda: pytest.fail("measured"))
    assert planned(composed("train.use_cpu=true"), []) is not None
