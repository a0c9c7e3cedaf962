"""Faults of adapters on their way to a vLLM server: `python -m tests.e2e.served_faults FOLDER PORT DTYPE`."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from grpo.generation.vllm import running_server
from grpo.generation.vllm.policy_weights import adapter_file
from grpo.options import Engine
from grpo.utils.errors import GenerationError
from grpo.utils.patching import replaced
from tests.engine_faults import LORA, trainer

Weights = dict[str, torch.Tensor]


def swapped(name: str) -> str:
    return name.replace(".0.", ".x.").replace(".1.", ".0.").replace(".x.", ".1.")


class Served:
    """A policy and its engine, a server; steps of an optimizer at 1e-6, each with a transfer and a generation."""

    def __init__(self, folder: Path, port: int, dtype: str) -> None:
        options = {"vllm_mode": "server", "vllm_server_port": port}
        made = trainer(folder, LORA, dtype=dtype, engine=Engine("adapter"), **options)
        self.made, self.engine = made, made.vllm_generation
        self.trained = [weight for weight in made.model.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-6, weight_decay=0)

    def __call__(self) -> None:
        for weight in self.trained:
            weight.grad = torch.randn_like(weight)
        self.optimizer.step()
        self.engine.sync_weights()
        self.engine.generate([[5, 6, 7]] * 4, None, 4)
        self.engine.checked = False

    def changed(self, change: Callable[[Weights], Weights]) -> Any:
        return replaced(running_server, "adapter_file", lambda model, weights: adapter_file(model, change(weights)))

    def base(self) -> Any:
        """Requests are for the base model."""
        send, client = self.engine.vllm.load_adapter, self.engine.vllm_client
        name = client.model.rpartition("policy-")[0] or self.made.model.config._name_or_path

        def send_for_nothing(*adapter: Any) -> None:
            send(*adapter)
            client.model = name

        return replaced(self.engine.vllm, "load_adapter", send_for_nothing)

    def unload(self) -> None:
        """Leave the server without an adapter, as after a restart."""
        client = self.engine.vllm_client
        client.session.post(f"{client.base_url}/v1/unload_lora_adapter", json={"lora_name": client.model})

    def faults(self) -> dict[str, Any]:
        before = self.engine._adapter()
        return {
            "skipped": replaced(self.engine, "sync_weights", lambda: None),
            "one layer skipped": self.changed(lambda them: {n: w for n, w in them.items() if ".1." not in n}),
            "to the wrong name": self.changed(lambda them: {swapped(n): w for n, w in them.items()}),
            "of the step before": self.changed(lambda them: before),
            "applied twice": self.changed(lambda them: {n: w * (1 + ("lora_B" in n)) for n, w in them.items()}),
            "not applied": self.base(),
            "the base again, after a restart": replaced(self.engine, "sync_weights", self.unload),
        }


def main(folder: Path, port: int, dtype: str) -> None:
    """Write the reasons for which runs end, by fault, into `found.json`; "" without any.

    More than 50 transfers that arrive come first, and completions around a check.
    """
    served, found = Served(folder, port, dtype), dict[str, Any]()
    for _ in range(55):
        served()
    said = []
    for _ in range(2):
        said.append(served.engine.complete([[5, 6, 7], [8, 9]]))
        served.engine.check_transfer()
    found["completions"] = said
    for name in served.faults():
        served()
        with served.faults()[name]:
            try:
                served()
                found[name] = ""
            except GenerationError as error:
                found[name] = str(error)
        served.engine.sync_weights()
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
