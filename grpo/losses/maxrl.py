"""MaxRL (2602.02710): the likelihood of a correct answer instead of its probability; harder problems weigh more.

The gradient of log p is the gradient of p divided by p. For N completions, K of them correct, the mean of the scores
∇log π of the correct completions is an unbiased estimate of its expansion to N terms (theorem 2). Subtracting the mean
score of all completions, whose expectation is zero, gives the sum of (r - mean r) / (N mean r) ∇log π; GRPO divides by
the standard deviation instead (algorithm 1). Rewards are 1 for correct completions and 0 for others; a sum of several
rewards must not be negative.

`epsilon` and `epsilon_high` clip the ratio as in PPO.
"""

from typing import TYPE_CHECKING, Any

from grpo.losses import Tokens

if TYPE_CHECKING:
    from torch import Tensor

MEAN = "sequences"
OPTIONS = {"scale_rewards": "none", "multi_objective_aggregation": "sum_then_normalize"}
"""Required options: TRL's advantages have to be the reward less the mean of the group."""


def advantage_factor(means: "Tensor") -> "Tensor":
    """Return the factor of the advantages of groups, given their mean rewards, (groups).

    Raises:
        ValueError: a mean is negative.
    """
    if bool((means < 0).any()):
        raise ValueError("train.loss_type=maxrl: the mean reward of a group is negative; it needs rewards of 0 or more")
    return (1 / means).masked_fill(~(means > 0), 0.0)  # a mean of no rewards is not a number


def per_token(tokens: Tokens, args: Any) -> tuple["Tensor", dict[str, "Tensor"]]:
    """Return the loss of each token, (completions, tokens), and which are clipped."""
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    ratio = (tokens.logps - tokens.old_logps).exp()
    clipped = ratio.clamp(1 - args.epsilon, 1 + high)
    loss = -(ratio * tokens.advantages).minimum(clipped * tokens.advantages) * tokens.correction
    too_low = (tokens.advantages < 0) & (ratio < 1 - args.epsilon)
    too_high = (tokens.advantages > 0) & (ratio > 1 + high)
    return loss, {
        "clip_ratio/low_mean": too_low,
        "clip_ratio/high_mean": too_high,
        "clip_ratio/region_mean": too_low | too_high,
    }
