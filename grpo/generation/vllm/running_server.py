"""The vLLM server of a run, on the processes of the run: weights and adapters go to it, and it is asked for them."""

import json
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from peft import PeftModel

from grpo.generation.vllm import server
from grpo.generation.vllm.checked_transfer import NOT_APPLIED, differing_on_server
from grpo.generation.vllm.held_weights import Part
from grpo.generation.vllm.policy_weights import adapter_file
from grpo.generation.vllm.server_requests import ServerRequests
from grpo.generation.vllm.watched_session import aborted_where_gone
from grpo.utils.errors import GenerationError


class RunningServer:
    """A vLLM server with the policy's weights; see `Colocated`, which has the same methods.

    Args:
        client: TRL's `VLLMClient`; None on all processes but the first, which do not ask.
        sends_adapter: whether the server gets the adapter alone.
        sees_images: whether prompts may have images.
        staleness: number of older adapters that requests may still use.
    """

    def __init__(self, client: Any, sends_adapter: bool, sees_images: bool = False, staleness: int = 0) -> None:
        self.client, self._sends_adapter = client, sends_adapter
        self._sees_images, self._staleness = sees_images, staleness
        self._run, self._version = uuid.uuid4().hex[:8], 0  # the server may still have the adapters of another run
        self.says_weights = False
        """Whether the server can be asked for its weights."""
        if client:
            self._started = server.started_at(client.base_url)
            self.requests = ServerRequests(client)
            client.generate = self.requests.generate
            self.says_weights = server.can_be_asked(client.base_url)

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """While inside, TRL sends all weights; requests of threads wait.

        Raises:
            GenerationError: it is another process than at first.
        """
        self._check_process()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # weights are read on streams that do not wait for the optimizer's
        with ExitStack() as within:
            if self.client:
                within.enter_context(self.requests.paused())
                within.enter_context(aborted_where_gone(self.client))
            yield
        if self.client and self._sees_images:  # the tower's weights saw images before
            self.client.session.post(f"{self.client.base_url}/reset_encoder_cache").raise_for_status()

    def load_adapter(self, policy: PeftModel, weights: dict[str, torch.Tensor]) -> None:
        """Load the adapter under a new name, and remove the adapter that no request uses any more.

        Under the same name vLLM would reuse prefixes that it computed with the old adapter. Requests in flight end with
        the adapter that they began with.

        Raises:
            GenerationError: the server refuses it.
        """
        self._version += 1
        if not self.client:
            return
        post, url = self.client.session.post, f"{self.client.base_url}/v1"
        unused, name = self._version - 1 - self._staleness, f"policy-{self._run}-{self._version}"
        with adapter_file(policy, weights) as folder:
            answer = post(f"{url}/load_lora_adapter", json={"lora_name": name, "lora_path": str(folder)})
        if answer.status_code != 200:
            reason = " ".join(answer.text.split())[:300]
            raise GenerationError(f"the vLLM server did not take the adapter: {reason}")
        self.client.model = name
        if unused > 0:  # gone already after a restart
            post(f"{url}/unload_lora_adapter", json={"lora_name": f"policy-{self._run}-{unused}"})

    def held(self, **request: Any) -> Iterator[Part]:
        """Yield the parts of weights that the server holds, as `HeldWeights` returns them."""
        for part in chain(*self.ask("held_weights", **request)):
            place = {"shape": torch.Size(part["shape"]), "stride": tuple(part["stride"])}
            yield Part(**part | place | {"dtype": getattr(torch, part["dtype"])})

    def differing_adapter(self, policy: PeftModel, weights: Mapping[str, torch.Tensor]) -> list[str]:
        """Return the names of the adapter's weights that the server holds otherwise, and of changed frozen weights."""
        shapes = {name: list(weight.shape) for name, weight in weights.items()}
        return differing_on_server(policy, weights, self.ask("held_adapter", shapes=shapes))

    def check_used(self) -> None:
        """Check that the completions are of the weights, or of the adapter, that the server got.

        Raises:
            GenerationError: it was started again, or has not applied the adapter.
        """
        if not self._sends_adapter:
            self._check_process()  # another one would not know the name of an adapter
        elif self.says_weights and not all(numbers and 0 not in numbers for numbers in self.ask("applied_adapters")):
            raise GenerationError(NOT_APPLIED)

    def _check_process(self) -> None:
        """Check that the server is still the process that received the policy's weights."""
        if self.client and server.started_at(self.client.base_url) != self._started:
            raise GenerationError(
                f"the vLLM server at {self.client.base_url} was started again in the middle of the run and has its "
                "first weights: continue from the checkpoint"
            )

    def ask(self, method: str, **request: Any) -> list[Any]:
        """Query all workers of the server, and return an answer per worker; none on processes that do not ask.

        Args:
            method: name of a method of `TellsWeights`.
            request: its argument.
        """
        if not self.client:
            return []
        body = {"method": method, "args": [json.dumps(request)]}
        answer = self.client.session.post(f"{self.client.base_url}/collective_rpc", json=body)
        answer.raise_for_status()
        return answer.json()["results"]
