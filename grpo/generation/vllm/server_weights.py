"""Digests of the weights that a vLLM server holds."""

import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from peft import PeftModel

from grpo.generation.vllm.checked_transfer import digest, places
from grpo.generation.vllm.held_adapter import FrozenWeights, HeldAdapter, applied, named, scaled
from grpo.generation.vllm.server import EXTENSION, LAUNCHER, settings_of
from grpo.utils.errors import ConfigError, GenerationError

log = logging.getLogger(__name__)
Ask = Callable[..., list[Any]]
"""Queries all workers of a server: the name of a method of `TellsWeights` and its arguments; an answer per worker."""


class TellsWeights:
    """Methods of a server's worker in addition to vLLM's own; they read weights and write none.

    Each method takes an object as JSON, because vLLM passes no other argument.
    """

    model_runner: Any
    _frozen: FrozenWeights | None = None

    def held_weights(self, request: str) -> list[dict[str, Any]]:
        """Return the places and digests of the worker's weights.

        Args:
            request: `shapes` of all weights by name, names of weights to digest `whole`, and for other weights `rows`,
                the first row and the number of rows.
        """
        given, answer = json.loads(request), []
        shapes = {name: torch.Size(shape) for name, shape in given["shapes"].items()}
        for name, parts in places(self.model_runner.model, shapes).items():
            for place in parts:
                said = place.described() | {"name": name}
                if name in given["whole"]:
                    answer.append(said | {"rows": False, "digest": digest(place.held)})
                if name in given["rows"]:
                    first, count = given["rows"][name]
                    held, _ = place.of_rows(torch.empty(count, *shapes[name][1:], device="meta"), first)
                    answer.append(said | {"rows": True, "digest": digest(held)})
        return answer

    def held_adapter(self, request: str) -> dict[str, Any]:
        """Return digests of the worker's newest adapter, and the frozen weights that changed since the last request.

        Args:
            request: `shapes` of the adapter's weights, by their names in PEFT's files.
        """
        manager = self.model_runner.lora_manager._adapter_manager
        self._frozen = self._frozen or FrozenWeights(named(self.model_runner.model))
        held = HeldAdapter(manager, max((number for number in manager.lora_index_to_id if number), default=0))
        weights = {name: held.weight(name, shape) for name, shape in json.loads(request)["shapes"].items()}
        digests = {name: [list(held.shape), digest(held)] for name, held in weights.items() if held is not None}
        dtype = str(manager.lora_config.lora_dtype).removeprefix("torch.")
        return {"dtype": dtype, "digests": digests, "changed": self._frozen.changed(few=True)}

    def applied_adapters(self, request: str) -> list[int]:
        """Return the numbers of the adapters of the worker's last batch, 0 for none."""
        return applied(self.model_runner.lora_manager._adapter_manager)


def can_be_asked(url: str) -> bool:
    """Return whether a server can digest its weights; otherwise warn that they are not checked."""
    with suppress(ConfigError):  # it does not say how it was started
        if settings_of(url).get("parallel_config", {}).get("worker_extension_cls") == EXTENSION:
            return True
    log.warning(
        f"the vLLM server at {url} cannot say which weights it holds, so a lost transfer is found by log-probabilities "
        f"alone, which may take hundreds of steps: start it with {LAUNCHER}"
    )
    return False


def asked(client: Any, method: str, **request: Any) -> list[Any]:
    """Query all workers of a server, and return an answer per worker.

    Args:
        client: TRL's `VLLMClient`.
        method: name of a method of `TellsWeights`.
        request: its argument.
    """
    body = {"method": method, "args": [json.dumps(request)]}
    answer = client.session.post(f"{client.base_url}/collective_rpc", json=body)
    answer.raise_for_status()
    return answer.json()["results"]


def differing_adapter(ask: Ask, policy: PeftModel, weights: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of adapter weights that differ on a server, and of frozen weights that have changed.

    Weights that several workers divide are not compared.

    Args:
        weights: weights of the adapter, by their names in PEFT's files.
    """
    wrong = []
    answers = ask("held_adapter", shapes={name: list(weight.shape) for name, weight in weights.items()})
    for said in answers:
        for name, weight in scaled(policy, weights, getattr(torch, said["dtype"])).items():
            shape, found = said["digests"].get(name, (None, None))
            is_part = shape is not None and shape != list(weight.shape) and len(answers) > 1
            if not is_part and found != digest(weight):
                wrong.append(name)
        wrong += said["changed"]
    return wrong


def check_adapter_is_applied(ask: Ask) -> None:
    """Check that a server has computed all sequences of its last batch with an adapter.

    Raises:
        GenerationError: it has not.
    """
    if any(not numbers or 0 in numbers for numbers in ask("applied_adapters")):
        raise GenerationError("the vLLM server has generated without the policy's adapter: use engine.lora=merged")
