"""What vLLM's options cannot be, and what vLLM cannot be combined with. No heavy import here."""

from omegaconf import DictConfig

from grpo.errors import ConfigError


def check_vllm_options(config: DictConfig) -> None:
    """Check the options of vLLM where it generates, or may.

    Raises:
        ConfigError: with the first thing that is wrong.
    """
    train = config.train
    if train.use_vllm is False:
        return
    if train.vllm_mode not in ("colocate", "server"):
        raise ConfigError(f"train.vllm_mode={train.vllm_mode}: possible: colocate, server")
    share = train.vllm_gpu_memory_utilization
    if share is not None and not 0 < share <= 1:
        raise ConfigError(
            f"train.vllm_gpu_memory_utilization={share}: a share of the memory, above 0 and at most 1; null leaves it "
            "to the plan"
        )
    for key in ("vllm_server_port", "vllm_group_port"):
        if not 0 < train[key] < 65536:
            raise ConfigError(f"train.{key}={train[key]}: a port from 1 to 65535")
    needed = config.task.max_prompt_length + (train.max_completion_length or 0)  # without one the plan complains
    if train.vllm_max_model_length is not None and train.vllm_max_model_length < needed:
        raise ConfigError(
            f"train.vllm_max_model_length={train.vllm_max_model_length}: a prompt and its completion take up to "
            f"{needed} tokens (task.max_prompt_length and train.max_completion_length); null leaves it to the plan"
        )
    if train.use_vllm and config.peft and (quantization := config.peft.get("quantization")):
        base, reason = "4-bit", "its weights cannot be merged with an adapter and sent on"
        if quantization.get("load_in_8bit"):
            base, reason = "8-bit", "it does not know this quantization"
        raise ConfigError(
            f"peft.quantization: vLLM cannot take a policy with {base} weights, {reason}; use generation=transformers, "
            "or peft=lora with a smaller model"
        )
