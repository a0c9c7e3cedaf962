"""Faults of a transfer, each found at the first step after it at a learning rate of 1e-6, and what is none."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import TrainerCallback

from grpo.generation.vllm.held_weights import TellsWeights
from grpo.generation.vllm.policy_weights import adapter_file
from grpo.generation.vllm.running_server import RunningServer
from grpo.generation.vllm.shared_weights import fingerprint
from grpo.options import Engine
from grpo.utils.errors import GenerationError
from tests.engine_faults import LORA, trainer
from tests.unit.generation.conftest import free_caches

pytestmark = pytest.mark.vllm
WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "merged": {"peft_config": LORA},
    "adapter": {"peft_config": LORA, "engine": Engine("adapter")},
    "shared": {"peft_config": LORA, "engine": Engine("adapter", share_weights=True)},
    "full, by a server's digests": {},
    "merged, by a server's digests": {"peft_config": LORA},
}
Pairs = Iterator[tuple[str, torch.Tensor]]


class Steps:
    """Steps of an optimizer at 1e-6, each with a transfer and a generation as in a training, without rewards."""

    def __init__(self, way: str, made: Any) -> None:
        self.way, self.made, self.engine = way, made, made.vllm_generation
        trained = [weight for weight in made.model.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-6, weight_decay=0)
        self.trained = trained

    def ask_worker(self) -> None:
        """Ask the engine as a server's, whose weights can only arrive from GPU to GPU."""
        worker = TellsWeights()
        worker.model_runner = self.engine.vllm.runner

        def ask(method: str, **request: Any) -> list:
            return json.loads(json.dumps([getattr(worker, method)(json.dumps(request))]))

        answering = RunningServer(None, sends_adapter=False)
        answering.ask = ask
        self.engine.vllm.held = answering.held

    def update(self) -> None:
        for weight in self.trained:
            weight.grad = torch.randn_like(weight)
        self.optimizer.step()

    def generate(self) -> None:
        self.engine.sync_weights()
        self.engine.generate([[5, 6, 7]] * 4, None, 4)
        self.engine.checked = False

    def __call__(self) -> None:
        self.update()
        self.generate()


@pytest.fixture(scope="module", params=[(way, dtype) for way in WAYS for dtype in ("float32", "bfloat16")], ids=str)
def steps(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Steps]:
    way, dtype = request.param
    steps = Steps(way, trainer(tmp_path_factory.mktemp("checked"), dtype=dtype, **WAYS[way]))
    if "digests" in way:
        steps.ask_worker()
    for _ in range(2):
        steps()
    yield steps
    free_caches(steps.engine)


def sent(change: Callable[[list[tuple[str, torch.Tensor]]], list]) -> Callable[[Steps, pytest.MonkeyPatch], None]:
    """A fault of the weights on their way."""

    def fault(steps: Steps, patch: pytest.MonkeyPatch) -> None:
        send = steps.engine._iter_named_params
        patch.setattr(steps.engine, "_iter_named_params", lambda: iter(change([(n, w.clone()) for n, w in send()])))

    return fault


def skipped(steps: Steps, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(steps.engine, "sync_weights", lambda: None)


def of_the_step_before(steps: Steps, patch: pytest.MonkeyPatch) -> None:
    if steps.engine.sends_adapter:
        before = steps.engine._adapter()
        patch.setattr("grpo.generation.vllm.colocated.adapter_file", lambda model, weights: adapter_file(model, before))
    else:
        pairs = [(name, weight.clone()) for name, weight in steps.engine._weights()]
        patch.setattr(steps.engine, "_iter_named_params", lambda: iter(pairs))


def changed_adapter(change: Callable[[dict], dict]) -> Callable[[Steps, pytest.MonkeyPatch], None]:
    def fault(steps: Steps, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(
            "grpo.generation.vllm.colocated.adapter_file",
            lambda model, weights: adapter_file(model, change(weights)),
        )

    return fault


def not_applied(steps: Steps, patch: pytest.MonkeyPatch) -> None:
    """The requests are for the base model."""
    llm, send = steps.engine.llm, steps.engine.vllm.load_adapter

    def sent_for_nothing(*adapter: Any) -> None:
        send(*adapter)
        llm.generate = lambda *args, **options: type(llm).generate(llm, *args, **options)

    patch.setattr(steps.engine.vllm, "load_adapter", sent_for_nothing)


def scaled(factor: float) -> Callable[[Steps, pytest.MonkeyPatch], None]:
    """The adapter is merged so many times."""

    def fault(steps: Steps, patch: pytest.MonkeyPatch) -> None:
        layers = [module for module in steps.made.model.modules() if isinstance(module, BaseTunerLayer)]
        send = steps.engine._iter_named_params

        def times() -> Pairs:
            for layer in layers:
                layer.scaling["default"] *= factor
            yield from [(name, weight.clone()) for name, weight in send()]
            for layer in layers:
                layer.scaling["default"] = LORA.lora_alpha / LORA.r

        patch.setattr(steps.engine, "_iter_named_params", times)

    return fault


def merged_too(steps: Steps, patch: pytest.MonkeyPatch) -> None:
    """The adapter is merged into the weights below it, and applied."""
    if steps.engine.sends_adapter:
        send = steps.engine.vllm.load_adapter
        merge = steps.made.model.merge_adapter
        patch.setattr(steps.engine.vllm, "load_adapter", lambda *adapter: (merge(), send(*adapter)))
        return
    send = steps.engine._iter_named_params

    def twice() -> Pairs:
        before = {n: w.data.clone() for n, w in steps.made.model.named_parameters() if "base_layer" in n}
        steps.made.model.merge_adapter()
        for module in steps.made.model.modules():
            if isinstance(module, BaseTunerLayer):
                module.merged_adapters.clear()
        yield from [(name, weight.clone()) for name, weight in send()]
        for name, data in before.items():
            steps.made.model.get_parameter(name).data.copy_(data)

    patch.setattr(steps.engine, "_iter_named_params", twice)


def swapped(name: str) -> str:
    layers = {".layers.0.": ".layers.1.", ".layers.1.": ".layers.0."}
    return next((name.replace(old, new) for old, new in layers.items() if old in name), name)


def first_ones(steps: Steps, patch: pytest.MonkeyPatch) -> None:
    """As an engine has them that was started again: those of its folder, or no adapter."""
    if steps.engine.sends_adapter:
        steps.engine.llm.llm_engine.remove_lora(steps.engine.vllm.version)
        patch.setattr(steps.engine, "sync_weights", lambda: None)
    else:
        model = type(
            steps.made.model.get_base_model() if hasattr(steps.made.model, "get_base_model") else steps.made.model
        )
        first = model.from_pretrained(steps.made.model.config._name_or_path, dtype=steps.made.model.dtype)
        patch.setattr(steps.engine, "_iter_named_params", lambda: iter(list(first.named_parameters())))


WEIGHTS = {
    "skipped": skipped,
    "one layer skipped": sent(lambda pairs: [pair for pair in pairs if ".layers.1." not in pair[0]]),
    "to the wrong name": sent(lambda pairs: [(swapped(name), weight) for name, weight in pairs]),
    "of the step before": of_the_step_before,
    "the base again, after a restart": first_ones,
}
MERGED = {"not applied": scaled(0), "applied twice": scaled(2), "merged and applied": merged_too}
ADAPTERS = {
    "skipped": skipped,
    "one layer skipped": changed_adapter(lambda weights: {n: w for n, w in weights.items() if ".layers.1." not in n}),
    "to the wrong name": changed_adapter(lambda weights: {swapped(n): w for n, w in weights.items()}),
    "of the step before": of_the_step_before,
    "the base again, after a restart": first_ones,
    "not applied": not_applied,
    "applied twice": changed_adapter(lambda weights: {n: w * (1 + ("lora_B" in n)) for n, w in weights.items()}),
}
FAULTS = {
    "full": WEIGHTS,
    "merged": WEIGHTS | MERGED,
    "adapter": ADAPTERS,
    "shared": ADAPTERS | {"merged and applied": merged_too},
}
FAULTS |= {f"{way}, by a server's digests": FAULTS[way] for way in ("full", "merged")}


def ends(steps: Steps, fault: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Why the first step after a fault ends the run."""
    if fault not in FAULTS[steps.way]:
        pytest.skip("cannot happen here")
    steps()
    with monkeypatch.context() as patch:
        FAULTS[steps.way][fault](steps, patch)
        steps.update()
        with pytest.raises(GenerationError) as caught:
            steps.generate()
    if fault == "merged and applied" and steps.way == "shared":
        steps.made.model.unmerge_adapter()
        steps.engine.vllm.checked_adapter.frozen.before = fingerprint(steps.engine.vllm.checked_adapter.frozen.weights)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("fault", dict.fromkeys([*ADAPTERS, *MERGED]))
def test_a_lost_transfer_is_found_at_its_first_step(steps: Steps, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert steps.optimizer.defaults["lr"] == 1e-6
    reason = ends(steps, fault, monkeypatch)
    assert "the engine does not hold the policy's weights: " in reason or "without the policy's adapter" in reason


PUBLIC = {"verl#7495": "skipped", "ms-swift#9855": "not applied", "unsloth#8701": "the base again, after a restart"}


@pytest.mark.parametrize("issue", PUBLIC)
def test_a_failure_of_another_trainer_is_found(steps: Steps, issue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ends(steps, PUBLIC[issue], monkeypatch)


def test_transfers_that_arrive_raise_no_alarm(steps: Steps) -> None:
    """More than 50, so that all weights are compared twice."""
    for _ in range(60):
        steps()


def test_a_check_changes_no_bit_and_no_completion(steps: Steps) -> None:
    steps()
    model = steps.engine.vllm.runner.model
    before, said = (
        {name: weight.clone() for name, weight in model.named_parameters()},
        steps.engine.complete([[5, 6, 7]]),
    )
    steps.engine._transfer._transfers = 0  # all weights
    steps.engine.check_transfer()
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    assert steps.engine.complete([[5, 6, 7]]) == said


@pytest.mark.parametrize("way", ["full", "merged", "adapter", "shared"])
def test_a_training_whose_transfers_stop_ends_after_a_step(tmp_path: Path, way: str) -> None:
    made = trainer(tmp_path, dtype="bfloat16", learning_rate=1e-6, **WAYS[way])
    made.add_callback(StopSending(made))
    with pytest.raises(GenerationError, match="does not hold the policy's weights"):
        made.train()
    assert made.state.global_step == 1


class StopSending(TrainerCallback):
    """Let the engine keep the weights that it has, from the second step on."""

    def __init__(self, made: Any) -> None:
        self.made = made

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.made.vllm_generation.sync_weights = lambda: None
