"""TRL's connection to vLLM, with exact weights, greedy evaluation, and one-line errors."""

import atexit
import copy
import logging
import os
import time
from collections.abc import Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object, is_peft_model
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration
from trl.import_utils import is_vllm_available

from grpo.config.facts import tells_kept_tokens
from grpo.config.transport import LOOPBACK, engine_rank, why_not
from grpo.generation.backend import Backend
from grpo.generation.kept_tokens import most_kept, with_kept, with_masks
from grpo.generation.vllm import colocated, server
from grpo.generation.vllm.checked_transfer import CheckedTransfer, lost
from grpo.generation.vllm.colocated import Colocated
from grpo.generation.vllm.drafts import OPTIONS, Drafts, exact_on_cpu
from grpo.generation.vllm.policy_weights import adapter_weights, is_sharded, policy_weights, trains_tied_weight
from grpo.generation.vllm.running_server import RunningServer
from grpo.generation.vllm.server_requests import explained
from grpo.generation.vllm.watched_session import WatchedSession
from grpo.options import VLLM
from grpo.utils.errors import GenerationError
from grpo.utils.patching import patched
from grpo.view.images import engine_options

if TYPE_CHECKING:
    from grpo.config.resolve import Resolved

log = logging.getLogger(__name__)
ENDS = ("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos")
"""Keys of `generation_kwargs` that say where completions end, in an evaluation, too."""
BATCH = 1024
"""Prompts that an evaluation gives vLLM at once."""


class PolicyEngine(VLLMGeneration, Backend):
    """TRL's connection to vLLM, colocated or on a server.

    The engine computes in the precision of the policy; under TRL vLLM chooses the precision. From a policy with LoRA
    the engine gets the adapter, or copies of the weights with the adapter merged in. If FSDP or ZeRO-3 shards the
    weights, TRL merges them in place. Every failure raises a `GenerationError`, so that the trainer never learns from a
    completion of other weights.

    Args:
        lora: `adapter` or `merged`, as in `engine.lora` of the configuration.
        shares: whether the policy gets its frozen weights from a colocated engine.
        most_images: largest number of images per prompt; None if unknown.
        quantization: of its frozen weights, by vLLM's name; None for none.
        corrected: whether the trainer corrects for a difference between the engine and the policy.
        drafts: of a colocated engine, as `engine.drafts` of the configuration.
        staleness: number of older adapters that requests to a server may still use.
        seed: of the run; a colocated engine draws by it, and by the number of the process.
    """

    sends_adapter = False
    """Whether vLLM gets the adapter alone; it has loaded the frozen weights from the same files as the policy."""
    masks = False
    """Whether vLLM tells the tokens that a sampling filter has kept, however many."""
    drafts: Drafts | None = None
    unexpanded: Mapping[tuple[int, ...], list[int]] = MappingProxyType({})
    """Prompts with images as `give_images` keeps them, by all of their tokens."""

    def __init__(
        self,
        model: torch.nn.Module,
        *args: Any,
        lora: str = "adapter",
        shares: bool = False,
        most_images: int | None = None,
        quantization: str | None = None,
        corrected: bool = False,
        drafts: str | None = None,
        staleness: int = 0,
        seed: int = 0,
        **options: Any,
    ) -> None:
        self._vocabulary = model.config.get_text_config().vocab_size
        self._most_kept = most_kept(options.get("top_k"), self._vocabulary) if corrected else 0
        self._corrected = corrected
        self.sends_adapter = is_peft_model(model) and lora == "adapter"
        if self.sends_adapter and (reason := why_not(model.peft_config["default"].to_dict())):
            raise ValueError(f"engine.lora=adapter: {reason}; use engine.lora=merged")
        self._most_images, self._quantization = most_images, quantization
        whole = self.sends_adapter and not getattr(model, "is_quantized", False)
        if quantization and not (whole and corrected and options["mode"] == "colocate"):
            raise ValueError(
                f"engine.quantization={quantization}: vLLM quantizes whole frozen weights beside an adapter "
                "(engine.lora=adapter), with vllm_mode=colocate and vllm_importance_sampling_correction=True"
            )
        self._seed, self._drafted = seed, drafts is not None
        self._shares, self._transfer, self.checked, self._staleness = shares, CheckedTransfer(), True, staleness
        self._says_weights = True
        self.vllm: Colocated | RunningServer
        super().__init__(model, *args, **options | {"logprobs": self._most_kept})

    @property
    def expands_images(self) -> bool:  # type: ignore[override]
        """Whether the engine expands image tokens itself, which a colocated engine does; a server gets all tokens."""
        return self.mode == "colocate"

    @classmethod
    def check(cls, settings: "Resolved") -> None:
        """Check that vLLM is installed, and that the server, if there is one, suits this run."""
        server.check_run(settings)

    @classmethod
    def described(cls, settings: "Resolved") -> str:
        """Return a line: where vLLM generates, and whether it gets adapter or weights, with the reason."""
        return server.described(settings)

    def _init_vllm(self) -> None:
        if getattr(self.model, "is_quantized", False) and not self.sends_adapter:
            raise ValueError("vLLM cannot take the weights of a quantized policy: use generation=transformers")
        if is_peft_model(self.model) and not self.sends_adapter and trains_tied_weight(self.model):
            raise ValueError(
                "vLLM has one weight for embeddings and head, and the adapter trains one of them: leave both out of "
                "peft.target_modules and peft.modules_to_save, or use generation=transformers"
            )
        if not is_vllm_available():
            super()._init_vllm()  # which says so
        logging.getLogger("torch._library").setLevel(logging.ERROR)  # that there is no Triton on a CPU is no news
        if self.mode == "colocate":
            self._start_colocated()
        else:
            self._connect()

    def _start_colocated(self) -> None:
        on_cpu = self.accelerator.device.type == "cpu"
        unbounded = self._corrected and not self._most_kept and (self.top_p < 1 or bool(self.min_p))
        self.masks = unbounded and tells_kept_tokens("colocated", "cpu" if on_cpu else "nvidia", VLLM)
        options, make = self._colocated_options(on_cpu), vllm_generation.LLM
        quantized = {"quantization": self._quantization} if self._quantization else {}

        def engine(seed: int, **of_trl: Any) -> Any:
            return make(**options | of_trl | quantized, seed=self._seed + seed)  # TRL's is the number of the process

        os.environ.setdefault("MASTER_PORT", colocated.free_port())
        if self.masks:
            os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")  # the only one that has them
            self.top_k = self._vocabulary  # vLLM asks for a limit
        with (
            patched("trl.generation.vllm_generation:LLM", engine),
            colocated.loadable() if on_cpu and (self._shares or not self.sends_adapter) else nullcontext(),
            colocated.one_adapter() if on_cpu and self.sends_adapter else nullcontext(),
        ):
            super()._init_vllm()
        atexit.register(colocated.leave_groups)
        if self._drafted:
            if self.llm.llm_engine.model_config.has_inner_state:
                raise ValueError("engine.drafts=ngram: layers of this model keep a state; leave it out")
            self.drafts = Drafts(self.llm)
        self.vllm = Colocated(self.llm, self.model, self.sends_adapter, self._shares, self.tensor_parallel_size > 1)

    def _colocated_options(self, on_cpu: bool) -> dict[str, Any]:
        """Return the options of a colocated engine beside TRL's."""
        dtype = colocated.compute_type(self.accelerator, self.model)
        colocated.check_kernels(dtype, on_gpu=not on_cpu, sends_adapter=self.sends_adapter)
        weights = sum(weight.numel() * weight.element_size() for weight in self.model.parameters())
        options = colocated.cpu_options(self.gpu_memory_utilization, weights) if on_cpu else {}
        revision = getattr(self.model.config, "_commit_hash", None)
        options |= {"dtype": dtype, "revision": revision, "tokenizer_revision": revision}
        options |= engine_options(self.processing_class, self._most_images)
        options |= {"max_logprobs": self._most_kept} if self._most_kept else {}
        options |= {"return_sampling_mask": True} if self.masks else {}
        options |= {"speculative_config": OPTIONS, "disable_log_stats": False} if self._drafted else {}
        if self.sends_adapter:
            options |= {"enable_lora": True, "max_lora_rank": engine_rank(self.model.peft_config["default"].r)}
        return options

    def _connect(self) -> None:
        """Connect to the server."""
        if any(host in (self.server_base_url or self.server_host) for host in LOOPBACK):
            os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")  # where the weights are handed over
        watched = partial(WatchedSession, self.server_base_url or f"http://{self.server_host}:{self.server_port}")
        by_nccl = VLLMClient.init_communicator if not self.sends_adapter else lambda *args, **options: None
        connect = "trl.generation.vllm_client:VLLMClient.init_communicator"
        with patched("requests:Session", watched), patched(connect, by_nccl):
            super()._init_vllm()
        client = self.vllm_client if self.accelerator.is_main_process else None
        sees_images = hasattr(self.processing_class, "image_processor")
        self.vllm = RunningServer(client, self.sends_adapter, sees_images, self._staleness)
        self._says_weights = any(gather_object([self.vllm.says_weights]))

    def _iter_named_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and weights in the same form as TRL."""
        sharded = is_sharded(self.model, self._dist.is_zero3)
        return self._transfer.sending(super()._iter_named_params() if sharded else self._weights())

    def _weights(self, only: Container[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the policy's weights with these names, or all; no sharded weights that TRL merges completely."""
        if not (is_peft_model(self.model) and is_sharded(self.model, self._dist.is_zero3)):
            yield from policy_weights(self.model, self._dist.gather_params, self.accelerator.device, only)

    def check_transfer(self) -> None:
        """Compare the weights that vLLM holds with the policy's, bit for bit.

        Raises:
            GenerationError: on some process a weight differs.
        """
        self.checked = True
        if not self._says_weights:
            wrong = []
        elif self.sends_adapter:
            wrong = self.vllm.differing_adapter(self.model, self._adapter())
        else:
            asks = self.mode == "colocate" or self.accelerator.is_main_process
            wrong = self._transfer.differing(self.vllm.held if asks else None, self._weights)
        if everyones := gather_object(wrong):
            raise GenerationError(lost(everyones))

    def _adapter(self) -> dict[str, torch.Tensor]:
        """Return the weights of the policy's adapter, on the CPU."""
        return adapter_weights(self.model, self._dist.gather_params)

    def sync_weights(self) -> None:
        """Give vLLM the policy's weights.

        Raises:
            GenerationError: it did not take them.
        """
        with explained(self, "took the policy's weights"):
            if self.sends_adapter:
                self.vllm.load_adapter(self.model, self._adapter())
            else:
                if self._dist.is_fsdp:  # changes precisions when training begins, after an evaluation
                    self._weight_metadata = None
                with self.vllm.receiving():
                    super().sync_weights()
            self.check_transfer()

    def generate(self, prompts: list[list[int]], images: list | None, *args: Any, **options: Any) -> tuple:
        """Complete prompts like TRL, except for images, whose tokens TRL 1.16 makes vLLM expand twice (trl#6294).

        Raises:
            GenerationError: vLLM failed, saw other prompts, or left a completion empty, as it does with requests that
                it gives up.
        """
        shown = [row or None for row in images] if images else None
        inputs = [self._in_short(ids) for ids in prompts] if images else prompts
        with explained(self, "generated"), self._exact():
            if not self.checked and not (self.mode == "colocate" and self._llm_weights_sleeping):
                self.check_transfer()
            began = time.perf_counter()
            result = super().generate(inputs, shown, *args, **options)
            seconds = time.perf_counter() - began
            self.vllm.check_used()
        seen, completions = result[:2]
        if inputs != prompts and list(map(list, seen)) != prompts:
            raise GenerationError("vLLM shows this model's images with other tokens: use generation=transformers")
        if len(completions) != len(prompts) or not all(completions):
            given_up = len(prompts) - sum(map(bool, completions))
            raise GenerationError(f"vLLM gave up {given_up} of {len(prompts)} completions; its log says why")
        if self.drafts and self.temperature:  # an evaluation's are greedy
            self.drafts.note(seconds, sum(map(len, completions)))
        if not self.logprobs:
            return result
        logprobs = with_kept(completions, *result[2:], self.logprobs, self._vocabulary)
        return *result[:2], logprobs, None

    @contextmanager
    def _exact(self) -> Iterator[None]:
        """Context in which completions come with the tokens of their masks, and drafts are lossless on a CPU."""
        with ExitStack() as within:
            if self.masks:
                within.enter_context(patched("trl.generation.vllm_generation:extract_logprobs", with_masks))
            if self.drafts and self.accelerator.device.type == "cpu":
                within.enter_context(exact_on_cpu())
            yield

    def metrics(self) -> dict[str, float]:
        return self.drafts.metrics() if self.drafts else {}

    def for_thread(self, accelerator: Any, name: str) -> "PolicyEngine":
        engine = copy.copy(self)
        engine.accelerator = accelerator
        engine.generation_kwargs = {**(self.generation_kwargs or {}), "request_id": name}
        return engine

    def abort(self, name: str) -> None:
        assert isinstance(self.vllm, RunningServer)  # only requests to a server are in flight
        self.vllm.requests.abort(name)

    def give_images(self, prompts: list[list[int]], unexpanded: list[list[int]]) -> None:
        """Keep prompts in vLLM's form with images: one token per image, which vLLM expands itself."""
        self.unexpanded = dict(zip(map(tuple, prompts), unexpanded, strict=True))

    def _in_short(self, ids: list[int]) -> list[int]:
        """Return a prompt with one token per image; a later turn begins with its prompt, and tools may add images."""
        begun = next((prompt for prompt in self.unexpanded if tuple(ids[: len(prompt)]) == prompt), ())
        image, added = self.processing_class.image_token_id, ids[len(begun) :]
        short = [token for before, token in zip([None, *added], added, strict=False) if not before == token == image]
        return [*self.unexpanded.get(begun, []), *short]

    @contextmanager
    def greedy(self) -> Iterator[None]:
        """While inside, the likeliest completions, which end as rollouts do, without their filters and penalties."""
        how = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0, "logprobs": 0}
        before = {name: getattr(self, name) for name in [*how, "generation_kwargs"]}
        ends = {name: value for name, value in (self.generation_kwargs or {}).items() if name in ENDS}
        if self.masks:  # which vLLM has of samples alone; the seed decides between equally likely tokens
            how, ends = how | {"temperature": 1.0, "top_k": 1}, ends | {"seed": 0}
        try:
            self.__dict__.update(how, generation_kwargs=ends)
            yield
        finally:
            self.__dict__.update(before)

    def changed_weights(self) -> list[str]:
        return self.vllm.changed_weights() if isinstance(self.vllm, Colocated) else []

    def asleep(self) -> int:
        if not (self.mode == "colocate" and self.enable_sleep_mode and self._llm_weights_sleeping):
            return 0
        from vllm.device_allocator.cumem import CuMemAllocator

        return CuMemAllocator.get_instance().get_current_usage()
