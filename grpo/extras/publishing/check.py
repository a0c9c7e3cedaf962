"""Refusals of a run with `train.push_to_hub`, before anything is loaded."""

from pathlib import Path

from omegaconf import DictConfig

from grpo.extras.publishing.hub import check_name, create_repository
from grpo.planning.sharding import sharding_of
from grpo.utils.errors import ConfigError

STRATEGIES = ("end", "every_save", "checkpoint", "all_checkpoints")


def check_push(config: DictConfig) -> None:
    """Raise a ConfigError for the first option of an upload that is wrong or does not work, without the network."""
    train = config.train
    if not train.hub_model_id:
        raise ConfigError("train.push_to_hub=true: to which repository? train.hub_model_id=OWNER/NAME")
    check_name(train.hub_model_id, "train.hub_model_id")
    if train.hub_strategy not in STRATEGIES:
        raise ConfigError(f"train.hub_strategy={train.hub_strategy}: one of {', '.join(STRATEGIES)}")
    reasons = {
        f"train.hub_revision={train.hub_revision}: uploads go to the branch main; leave it out": train.hub_revision,
        f"train.hub_strategy={train.hub_strategy}: checkpoints of sharded weights are no models; "
        "train.hub_strategy=end uploads the result": train.hub_strategy != "end" and sharding_of(config).library,
        "peft: nobody else has the base of the adapter, a folder of this machine; `python -m grpo.export RUN --push "
        "OWNER/NAME` uploads both, merged": config.peft and Path(config.model.model_name_or_path).exists(),
    }
    for text, refused in reasons.items():
        if refused:
            raise ConfigError(f"train.push_to_hub=true with {text}")


def prepare_push(config: DictConfig) -> None:
    """Create the repository of a run, private unless `train.hub_private_repo=false`; ConfigError if that fails."""
    public = config.train.hub_private_repo is False
    create_repository(config.train.hub_model_id, public, "train.hub_model_id", "train.hub_private_repo=false")
