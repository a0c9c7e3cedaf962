"""DPPO with the binary total variation (2602.04879, equations 11 to 13): PPO that masks where PPO clips.

A token counts until its probability has moved too far from its sampling probability, in the direction of its advantage.
For a rare token a ratio is not informative: its probability may double and stay small.

`epsilon` is the largest fall of a probability and `epsilon_high` its largest rise, 0.2 each by default, as in prime-rl.
"""

from typing import TYPE_CHECKING, Any

from grpo.losses import Tokens

if TYPE_CHECKING:
    from torch import Tensor

MEAN = "generation"


def per_token(tokens: Tokens, args: Any) -> tuple["Tensor", dict[str, "Tensor"]]:
    """Return the loss of each token, (completions, tokens), and which are masked."""
    moved = tokens.logps.detach().exp() - tokens.sampled_logps.exp()
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    too_low = (tokens.advantages < 0) & (moved < -args.epsilon)
    too_high = (tokens.advantages > 0) & (moved > high)
    ratio = (tokens.logps - tokens.sampled_logps).exp()
    loss = -ratio * tokens.advantages
    masked = too_low | too_high
    return loss.masked_fill(masked, 0.0), {
        "clip_ratio/low_mean": too_low,
        "clip_ratio/high_mean": too_high,
        "clip_ratio/region_mean": masked,
    }
