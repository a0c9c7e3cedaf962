"""Takes a training back to a checkpoint: weights, optimizer, reference; step, data and schedule continue."""

from pathlib import Path
from typing import Any

import torch
from transformers.trainer import OPTIMIZER_NAME

from grpo.trainer import trl


def roll_back(trainer: Any, checkpoint: Path) -> None:
    """Load a checkpoint between two steps of a training, and halve the learning rate from now on.

    The next step samples new rollouts: those in stock are of the policy that is left behind. The engine gets the
    weights with the next transfer. Data, schedule and random numbers go on where they are.

    Args:
        trainer: an `ExactGRPOTrainer`, which trains.
        checkpoint: of this training.
    """
    trl.load_weights(trainer, str(checkpoint))
    device = trainer.args.device if trainer.args.device.type != "cpu" else torch.device("cpu")
    trainer.optimizer.load_state_dict(torch.load(checkpoint / OPTIMIZER_NAME, map_location="cpu", weights_only=True))
    parts = sorted(checkpoint.glob("grpo_state*.pt"))  # of each process; what is learned is the same in all
    trainer.resume.load_learned(trainer, torch.load(parts[0], map_location=device, weights_only=True))
    trl.drop_rollouts(trainer)
    trl.halve_learning_rate(trainer)
