"""Temporary replacement of names; a single table lists all replacements in libraries."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pkgutil import resolve_name
from typing import Any

PATCHES = {
    "argparse:ArgumentParser._check_help": "Python 3.14 checks the help of an option, which has to be text, and Hydra "
    "1.3.8 has an object that becomes text when it is printed; until Hydra has text (facebookresearch/hydra#3121)",
    "hydra._internal.config_loader_impl:ConfigLoaderImpl.get_group_options": "`--help` copies all configurations for "
    "each group, for seconds; until Hydra lists the options without loading them",
    "hydra._internal.hydra:Hydra.create_main_hydra2": "./conf and GRPO_CONFIG_DIR come behind `--config-dir`; "
    "until Hydra asks its plugins for folders after it has read that option",
    "transformers.trainer:rotate_checkpoints": "a checkpoint is sealed before older ones are deleted; until there is "
    "a callback between writing and deleting",
    "transformers.integrations.sdpa_attention:use_gqa_in_sdpa": "attention on a CPU takes grouped keys beside a "
    "mask, too, so that they are not copied per query head; until transformers asks for the device",
    "trl.trainer.grpo_trainer:VLLMGeneration": "the engine sends adapters, shares weights and is compared with the "
    "policy; until TRL takes an engine as an argument",
    "trl.trainer.grpo_trainer:split_pixel_values_by_grid": "the images of a row stay together in Idefics and SmolVLM, "
    "also if there are as many images as rows, which TRL takes for one each; until TRL looks at their mask",
    "trl.trainer.grpo_trainer:parse_response": "a completion of a thousand brackets, as collapsed policies write, is "
    "text and no RecursionError; until TRL catches that, too",
    "trl.trainer.grpo_trainer:nanmin": "metrics of a micro-batch do not wait for the GPU; until TRL does not look for "
    "NaN on the host",
    "trl.trainer.grpo_trainer:nanmax": "likewise",
    "trl.trainer.grpo_trainer:gather": "rank 0 makes rollouts for all processes in threads, which must not wait for "
    "the others; until TRL gathers rewards by its accelerator",
    "trl.generation.vllm_generation:gather_object": "likewise",
    "trl.generation.vllm_generation:broadcast_object_list": "likewise",
    "trl.trainer.utils:_use_triton": "the head scores completions alone on a CPU too; until TRL leaves out prompts "
    "where it has no Triton",
    "trl.trainer.utils:_CHUNKED_LOGPROB_CHUNK_SIZE": "the head's tiles stay in a CPU's caches; until TRL has a size "
    "for devices without Triton",
    "trl.trainer.utils:_ChunkedLogProbFunction": "the head scores the tokens that a sampling filter has kept, too; "
    "until TRL's correction knows them (huggingface/trl#6789)",
    "transformers.models.mixtral.modeling_mixtral:load_balancing_loss_func": "a router's loss is a sum over "
    "micro-batches; until TRL's loss takes the fractions of tokens as an argument",
    "trl.generation.vllm_generation:LLM": "dtype, revision, LoRA and images of the engine; until TRL passes options on",
    "trl.generation.vllm_generation:extract_logprobs": "log-probabilities come with vLLM's masks of the tokens that a "
    "sampling filter has kept; until TRL's generation returns these masks",
    "trl.generation.vllm_client:VLLMClient.init_communicator": "adapters travel as files, without NCCL; until TRL asks",
    "requests:Session": "a request to a server that hangs ends; until TRL's client has time-outs",
    "accelerate.accelerator:fsdp2_prepare_model": "only rank 0 casts all weights of a policy to float32; until "
    "accelerate casts after it has moved the other processes' weights to the meta device",
    "accelerate.utils.fsdp_utils:_find_final_norm": "the norm before the output layer of a policy that sees images is "
    "in its language model; until accelerate looks there",
    "accelerate.utils.fsdp_utils:_prepare_sd_options": "a weight that never had a gradient, as in the last layer of a "
    "tower whose features come from the layer before, has no state in the optimizer; until accelerate loads without it",
    "torch.distributed.elastic.agent.server.local_elastic_agent:LocalElasticAgent._monitor_workers": "processes that "
    "end because a machine has left or comes use up no restart; until torchelastic tells them from those that fail",
    "torch.distributed.elastic.agent.server.local_elastic_agent:LocalElasticAgent._stop_workers": "a step and its "
    "checkpoint may take longer than 30 s where a machine comes; until torchelastic has an option",
    "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm": "vLLM's CPU build packs weights and throws the "
    "originals away, to which new ones are written; until it keeps them",
    "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens": "vLLM's CPU build checks drafts at temperatures that it "
    "has written to a copy; until its kernel returns them",
    "vllm.platforms.cpu:CpuPlatform.get_punica_wrapper": "vLLM's LoRA layers copy the adapter for each token on a CPU; "
    "until they do not",
}
"""Replaced names of libraries, `module:name`, with the reason and the change that would make it unnecessary."""


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """While inside, a name of an object of ours, or of a test, is something else."""
    before, inherited = getattr(owner, name), name not in vars(owner)
    setattr(owner, name, value)
    inherited = inherited and name in vars(owner)  # and not the value of a property
    try:
        yield
    finally:
        if inherited:  # a copy of the owner has a method of its own again
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def patched(name: str, value: Any) -> AbstractContextManager[None]:
    """Return a context in which a name of a library, listed in `PATCHES`, is replaced."""
    assert name in PATCHES, name
    module, _, path = name.partition(":")
    owner, _, last = path.rpartition(".")
    return replaced(resolve_name(f"{module}:{owner}" if owner else module), last, value)
