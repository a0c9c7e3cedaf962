"""Refusals of a guarded run, from a composed configuration, before anything is loaded."""

from collections.abc import Iterator

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.singleton import Singleton
from omegaconf import DictConfig

from grpo.config.schema import ROOT, register
from grpo.extras.guard.check import check_guard
from grpo.utils.errors import ConfigError


@pytest.fixture(autouse=True)
def own_hydra() -> Iterator[None]:
    state = Singleton.get_state()
    GlobalHydra.instance().clear()
    register()
    yield
    GlobalHydra.instance().clear()
    Singleton.set_state(state)


def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(ROOT / "conf"), version_base=None):
        return compose("config", list(overrides))


def test_a_guard_is_a_choice_and_its_callback_comes_last() -> None:
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
def test_what_does_not_fit_a_guard_is_a_line(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_guard(composed("guard=accuracy", override))
