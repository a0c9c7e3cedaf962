"""Refusals of `train.push_to_hub`, without a network."""

from collections.abc import Callable

import pytest
from omegaconf import DictConfig

from grpo.extras.publishing.check import check_push
from grpo.utils.errors import ConfigError

Compose = Callable[..., DictConfig]

NAMED = "train.hub_model_id=me/run"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([], "to which repository? train.hub_model_id=OWNER/NAME"),
        (["train.hub_model_id=run"], "train.hub_model_id: 'run' is no OWNER/NAME"),
        ([NAMED, "train.hub_strategy=each"], "train.hub_strategy=each: one of end, every_save, checkpoint"),
        ([NAMED, "train.hub_revision=next"], "train.hub_revision=next: uploads go to the branch main"),
        ([NAMED, "shard=fsdp2", "launch.processes=2"], "checkpoints of sharded weights are no models"),
        ([NAMED, "peft=lora"], "nobody else has the base of the adapter"),
    ],
)
def test_an_upload_that_cannot_work_is_a_line(overrides: list[str], says: str, composed: Compose) -> None:
    with pytest.raises(ConfigError, match=says.replace("?", r"\?")):
        check_push(composed("train.push_to_hub=true", *overrides))


@pytest.mark.parametrize("overrides", [[], ["shard=fsdp2", "launch.processes=2", "train.hub_strategy=end"]])
def test_an_upload_that_works_is_not_refused(overrides: list[str], composed: Compose) -> None:
    check_push(composed("train.push_to_hub=true", NAMED, *overrides))
