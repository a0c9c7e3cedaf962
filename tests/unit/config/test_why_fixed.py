"""Which runs keep their number of processes, each with its reason."""

from collections.abc import Callable

import pytest
from omegaconf import DictConfig

from grpo.config.nodes import why_fixed, why_routers_fixed

Compose = Callable[..., DictConfig]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (("shard=zero3",), "train.deepspeed: DeepSpeed loads its state into as many processes as have saved it"),
        (("train.loss_type=bnpo",), "train.loss_type=bnpo: its mean depends on the completions that are computed"),
        (("train.entropy_coef=0.01",), "train.entropy_coef: an entropy bonus depends on"),
        (("train.use_adaptive_entropy=true",), "train.entropy_coef: an entropy bonus depends on"),
        (("train.top_entropy_quantile=0.2",), "train.top_entropy_quantile=0.2: it depends on"),
        (("train.optim=adalomo",), "train.optim=adalomo: it steps for each slice"),
        (("train.sync_ref_model=true", "shard=fsdp2"), "train.sync_ref_model=true: FSDP2 saves"),
        (("update.gradients_on_host=true",), "update.gradients_on_host=true: it works with one process"),
        (
            ("generation=vllm_colocate", "train.vllm_tensor_parallel_size=2"),
            "train.vllm_tensor_parallel_size=2: it has to divide launch.processes=1",
        ),
        (("task=shapes", "train.num_iterations=2"), "task.images: images of a generation cannot move"),
        (("task=shapes", "train.steps_per_generation=2"), "task.images: images of a generation cannot move"),
    ],
)
def test_a_run_that_keeps_its_processes_says_why(composed: Compose, changes: tuple[str, ...], reason: str) -> None:
    assert (why_fixed(composed(*changes)) or "").startswith(reason)


@pytest.mark.parametrize(
    "changes",
    [
        (),
        ("train.num_iterations=2", "train.steps_per_generation=2"),
        ("shard=fsdp2",),
        ("train.sync_ref_model=true", "train.beta=0.1"),
        ("task=shapes",),
        ("task=shapes", "shard=fsdp2"),
        ("generation=vllm_server", "engine.staleness=2"),
        ("rollout.dynamic_sampling=true", "peft=lora"),
    ],
)
def test_other_runs_change_their_processes(composed: Compose, changes: tuple[str, ...]) -> None:
    assert why_fixed(composed(*changes)) is None


def test_a_loss_of_routers_keeps_the_processes(composed: Compose) -> None:
    train, without = composed().train, composed("train.router_aux_loss_coef=0").train
    assert "train.router_aux_loss_coef=0" in (why_routers_fixed(train, experts=4) or "")
    assert why_routers_fixed(train, experts=0) is None
    assert why_routers_fixed(without, experts=4) is None
