"""Thresholds and advice that live warnings and the page share."""

from omegaconf import DictConfig

MISMATCH = 0.1
"""Nats per token; half precision and other kernels alone make 0.01 to 0.05."""

ADVICE = (
    "lower learning_rate, max_grad_norm or adam_beta2, or look at the data: a reward that is infinite or huge, "
    "a completion that is empty or endless"
)
"""Advice against gradients that are not finite."""


def mismatch_causes(train: DictConfig) -> list[str]:
    """Return possible causes of a difference between vLLM's log-probabilities and the policy's, the likeliest first."""
    found = []
    if train.vllm_mode == "server":
        found.append("a server with another model, precision or --logprobs-mode: launch/vllm_server.sh")
    found.append("weights in half precision (model.dtype, train.bf16), most of all with a mixture of experts")
    return [*found, "a vLLM version that TRL does not know: `make vllm` installs the one that is tested"]
