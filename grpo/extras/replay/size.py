"""Bytes that `replay.keep` takes on the disk."""

from omegaconf import DictConfig

from grpo.config.batch import completions
from grpo.planning.fit import Plan
from grpo.planning.from_config import find_shape

PER_TOKEN = 44
"""Bytes of a token: id and mask of 8 each, up to five numbers of 4, and the lists of the completion."""
PER_COMPLETION = 6 * 1024
"""Bytes of a completion beside its tokens: its text, columns and rewards."""
PER_TENSOR = 420
"""Bytes of a fingerprint with the tensor's name."""
TENSORS_PER_LAYER = 9
FINGERPRINTS = 4
"""Fingerprints per tensor: of gradient, weights, and two moments of the optimizer."""


def replay_bytes(config: DictConfig, plan: Plan) -> int:
    """Return the bytes that the files in `replay/` take at most: of the last `keep` steps, back to a checkpoint."""
    train = config.train
    tokens = config.task.max_prompt_length + train.max_completion_length
    rollouts = completions(train, plan.processes) * (tokens * PER_TOKEN + PER_COMPLETION)
    tensors = (find_shape(config.model).num_hidden_layers * TENSORS_PER_LAYER + 3) * (1 if config.peft is None else 2)
    saved = train.save_steps if train.save_strategy == "steps" and train.save_steps >= 1 else 0
    return int((config.replay.keep + saved) * (rollouts + plan.processes * tensors * FINGERPRINTS * PER_TENSOR))
