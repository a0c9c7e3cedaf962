"""vLLM beside the policy: TRL's connection to it, with exact weights, greedy answers, and reasons where it fails."""

import logging
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import psutil
import requests
import torch
from accelerate.utils import is_peft_model
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

from grpo.memory import ENGINE

log = logging.getLogger(__name__)
COMPUTE = {"bf16": "bfloat16", "fp16": "float16"}
AGAIN = "start it again with launch/vllm_server.sh"
RESTARTED = "was started again in the middle of the run and has its first weights"


class GenerationError(RuntimeError):
    """vLLM gave up; the message is one line that says why and what to do."""


class PolicyEngine(VLLMGeneration):
    """TRL's connection to vLLM, colocated or a server.

    The engine computes in the precision of the policy, where TRL leaves it to vLLM; adapters are merged into copies;
    and what goes wrong ends in a `GenerationError`, before a completion that the policy has not made is taken for one.
    """

    def _init_vllm(self) -> None:
        if self.mode == "colocate":
            dtype = COMPUTE.get(self.accelerator.mixed_precision, str(self.model.dtype).removeprefix("torch."))
            on_cpu = self.accelerator.device.type == "cpu"
            weights = sum(weight.numel() * weight.element_size() for weight in self.model.parameters())
            options = cpu_options(self.gpu_memory_utilization, weights) if on_cpu else {}
            with replaced(vllm_generation, "LLM", partial(vllm_generation.LLM, dtype=dtype, **options)), loadable():
                super()._init_vllm()
        else:
            super()._init_vllm()
            if self.accelerator.is_main_process:
                self._server_started = started_at(self.vllm_client.base_url)

    def _iter_named_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        if is_peft_model(self.model) and self.accelerator.distributed_type.value not in ("FSDP", "DEEPSPEED"):
            return merged_weights(self.model)
        return super()._iter_named_params()

    def sync_weights(self) -> None:
        """Give vLLM the policy's weights.

        Raises:
            GenerationError: it did not take them.
        """
        with self._explained("took the policy's weights"):
            self._check_server()
            super().sync_weights()

    def generate(self, prompts: list[list[int]], *args: Any, **options: Any) -> tuple:
        """Complete prompts as TRL does.

        Raises:
            GenerationError: vLLM failed, or left a completion empty, as it does with requests that it gives up.
        """
        with self._explained("generated"):
            result = super().generate(prompts, *args, **options)
            self._check_server()
        completions = result[1]
        if len(completions) != len(prompts) or not all(completions):
            given_up = len(prompts) - sum(map(bool, completions))
            raise GenerationError(f"vLLM gave up {given_up} of {len(prompts)} completions; its log says why")
        return result

    def complete(self, prompts: list[list[int]], images: list | None = None) -> list[list[int]]:
        """Return the likeliest completion of each prompt, without the filters and penalties of the rollouts."""
        greedy = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
        before = {name: getattr(self, name) for name in [*greedy, "generation_kwargs"]}
        try:
            self.__dict__.update(greedy, generation_kwargs={})
            return self.generate(prompts, images, 1)[1]
        finally:
            self.__dict__.update(before)

    def _check_server(self) -> None:
        """Check that the server is still the process that has had the policy's weights."""
        if self.mode == "server" and self.accelerator.is_main_process:
            url = self.vllm_client.base_url
            if started_at(url) != self._server_started:
                raise GenerationError(f"the vLLM server at {url} {RESTARTED}: end what else uses it")

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except GenerationError:
            raise
        except requests.RequestException as error:
            url = self.vllm_client.base_url
            reason = f"the vLLM server at {url} went away while it {what} ({type(error).__name__}): {AGAIN}"
            raise GenerationError(reason) from error
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise GenerationError(f"vLLM failed while it {what}: {type(error).__name__}: {reason}") from error


def answer(trainer: Any, prompts: list[Any], temperature: float = 0.0, seeds: Sequence[int] = ()) -> list[str]:
    """Continue each prompt, plain or conversational, by vLLM with the weights that it has; the likeliest completion."""
    assert temperature == 0.0
    ids, images, _ = trainer._tokenize_prompts(prompts)
    return trainer._tokenizer.batch_decode(trainer.vllm_generation.complete(ids, images), skip_special_tokens=True)


def started_at(url: str) -> str:
    """Return when the process of a server was started, as its metrics say; nothing if they do not."""
    lines = requests.get(f"{url}/metrics", timeout=60).text.splitlines()
    return next((line for line in lines if line.startswith("process_start_time_seconds")), "")


@torch.no_grad()
def merged_weights(model: PeftModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name that vLLM knows and the value of each weight, with the adapters merged in.

    A layer with adapters is merged in a copy, one at a time. Merging in place and taking the adapter off again, as TRL
    does, rounds twice, and in bfloat16 the weights that were not to be trained drift away.
    """
    adapters = defaultdict(list)
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            adapters[module.get_base_layer()].append(module)
    layer, merged = None, dict[str, torch.Tensor]()
    for name, weight in model.named_parameters():
        if model.prefix in name or "original_module" in name:  # the adapters, and what a trained copy stands for
            continue
        owner, _, own_name = name.rpartition(".")
        module = model.get_submodule(owner)
        if module in adapters and module is not layer:
            layer, merged = module, merged_copy(module, adapters[module])
        known = name.removeprefix("base_model.model.").replace(".base_layer", "")
        for part in ("modules_to_save.default.", "_checkpoint_wrapped_module."):
            known = known.replace(part, "")
        yield known, merged[own_name] if module is layer else weight.data


def merged_copy(layer: torch.nn.Module, adapters: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Return a layer's weights with its adapters merged in; the layer itself keeps its bits."""
    own = {name: (weight, weight.data) for name, weight in layer.named_parameters(recurse=False)}
    try:
        for weight, data in own.values():
            weight.data = data.clone()
        for adapter in adapters:
            adapter.merge()
        return {name: weight.data for name, (weight, _) in own.items()}
    finally:
        for adapter in adapters:
            adapter.merged_adapters.clear()
        for weight, data in own.values():
            weight.data = data


def cpu_options(share: float, weights: float) -> dict[str, Any]:
    """Return how an engine runs on a CPU: its cache in what the share leaves beside weights, without a compiler.

    vLLM's own rule would count all that this process holds as part of the share.
    """
    cache = max(share * psutil.virtual_memory().total - weights - ENGINE, ENGINE / 3)
    kept = "VLLM_CPU_KVCACHE_SPACE" in os.environ  # the user's choice, in GiB
    return {"enforce_eager": True, "block_size": 32} | ({} if kept else {"kv_cache_memory_bytes": int(cache)})


@contextmanager
def loadable() -> Iterator[None]:
    """While inside, an engine on a CPU keeps its weights as they are.

    It packs them otherwise, throws the originals away, and what is synchronized later fails or does not arrive.
    """
    from vllm.model_executor.layers import utils

    def unpacked(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    with replaced(utils, "dispatch_cpu_unquantized_gemm", unpacked):
        yield


@contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """While inside, a name of a module is something else."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
