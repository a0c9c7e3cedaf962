"""Refusals of a guarded run, from a composed configuration, before anything is loaded."""

from collections.abc import Callable

import pytest
from omegaconf import DictConfig

from grpo.extras.guard.check import check_guard
from grpo.utils.errors import ConfigError


def test_a_guard_is_a_choice_and_its_callback_comes_last(composed: Callable[..., DictConfig]) -> None:
    assert composed().guard == {}
    config = composed("guard=accuracy", "guard.every=7")
    assert list(config.callbacks)[-1] == "guard"
    assert config.callbacks.guard.kwargs.every == 7
    check_guard(config)
    check_guard(composed("train.load_best_model_at_end=true"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("guard.every=0", "guard.every=0: a number of steps, at least 1"),
        ("guard.samples=many", "guard.samples=many: a number of held-out problems"),
        ("guard.rollbacks=-1", "guard.rollbacks=-1: a number of rollbacks, or 0"),
        ("guard.error=5", "guard.error=5: a probability between 0 and 1"),
        ("guard.plateau=true", "guard.plateau=True: a number of looks, or null"),
        ("task.eval.size=0", "guard=accuracy: task.eval.size=0: .* task.eval.size=200 holds some out"),
        ("shard=zero2", "guard=accuracy: shard: .* shard=none"),
        ("engine.staleness=1", "guard=accuracy: engine.staleness=1: .* engine.staleness=0"),
        ("train.save_only_model=true", "guard=accuracy: train.save_only_model=true: .* needs the optimizer's state"),
        ("train.lr_scheduler_type=greedy", "guard=accuracy: train.lr_scheduler_type=greedy: .*constant"),
        ("train.load_best_model_at_end=true", "guard=accuracy: the guard chooses the best checkpoint; leave out"),
        ("replay.keep=5", "guard=accuracy: replay.keep: .* train.save_total_limit=null keeps all"),
    ],
)
def test_what_does_not_fit_a_guard_is_a_line(composed: Callable[..., DictConfig], override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_guard(composed("guard=accuracy", override))
