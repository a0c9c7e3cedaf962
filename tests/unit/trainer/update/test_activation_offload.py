"""Inputs of checkpointed layers in host memory: the same bits, and the order of streams that gives them on a GPU."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig

from grpo.trainer import ExactGRPOTrainer, Update
from grpo.trainer.update import activation_offload
from grpo.trainer.update.activation_offload import ActivationOffload
from tests.stock_trl import make, train

CHECKPOINTED: dict[str, Any] = {"gradient_checkpointing": True, "max_steps": 2}


@pytest.mark.parametrize("method", ["full", "LoRA", "two iterations", "undivided"])
def test_offloaded_inputs_change_no_bit(tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = dict(CHECKPOINTED)
    if method == "LoRA":
        options["peft_config"] = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    if method == "two iterations":
        options |= {"num_iterations": 2, "beta": 0.04}
    if method == "undivided":
        options["top_entropy_quantile"] = 0.2
    left: list[int] = []
    offload = ActivationOffload._offload
    monkeypatch.setattr(ActivationOffload, "_offload", lambda self, tensor: left.append(1) or offload(self, tensor))
    weights = []
    for on_host in (False, True):
        torch.manual_seed(0)
        update = Update(max_tokens_per_microbatch=100, activations_on_host=on_host)
        trainer = make(ExactGRPOTrainer, tmp_path, update=update, **options)
        train(trainer)
        weights.append(trainer.model.state_dict())
        assert bool(left) == on_host
    assert len(left) % trainer.model.config.num_hidden_layers == 0, "each layer's input left"
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name]), name


def test_offloading_without_checkpointing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"add train\.gradient_checkpointing=true"):
        make(ExactGRPOTrainer, tmp_path, update=Update(activations_on_host=True))


class Stream:
    """A stream that works as late as it may: its copies happen when somebody waits for their event."""

    def __init__(self, *args: Any) -> None:
        self.copies: list[Callable[[], None]] = []
        self.waited = False

    def wait_stream(self, other: "Stream") -> None:
        self.waited = True

    def wait_event(self, event: tuple["Stream", int]) -> None:
        stream, number = event
        for copy in stream.copies[:number]:
            copy()
        stream.copies[:number] = [lambda: None] * number

    def record_event(self) -> tuple["Stream", int]:
        self.waited = False
        return self, len(self.copies)


class Driver(TorchDispatchMode):
    """Where a stream is entered, its copies wait; a tensor that has been freed before its copy is an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.current, self.entered = Stream(), list[Stream]()
        empty, empty_like = torch.empty, torch.empty_like

        def unpinned(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
            return empty_like(*args, **options).fill_(torch.nan)

        monkeypatch.setattr(torch, "empty_like", unpinned)
        monkeypatch.setattr(torch, "empty", lambda *args, **options: empty(*args, **options).fill_(torch.nan))
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.enter)

    @contextmanager
    def enter(self, stream: Stream) -> Iterator[None]:
        self.entered.append(stream)
        yield
        self.entered.pop()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (self.entered and function is torch.ops.aten.copy_.default):
            return function(*args, **(kwargs or {}))
        assert self.entered[-1].waited, "for the work that makes the tensor, or that last used its memory"
        memory = [StorageWeakRef(tensor.untyped_storage()) for tensor in args[:2]]
        target, source, size = args[0].data_ptr(), args[1].data_ptr(), args[1].nbytes

        def copy() -> None:
            assert not any(part.expired() for part in memory), "freed before it was copied"
            ctypes.memmove(target, source, size)

        self.entered[-1].copies.append(copy)
        return args[0]


def test_the_streams_of_a_gpu_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=32, num_hidden_layers=5, **sizes))
    model.gradient_checkpointing_enable()
    model.train()
    ids = torch.randint(32, (2, 7))

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(ids).logits.logsumexp(-1).sum().backward()
        return [weight.grad.clone() for weight in model.parameters()]

    expected, on_device = gradients(), list[tuple[int, int]]()
    driver = Driver(monkeypatch)
    monkeypatch.setattr(activation_offload, "PINNED_PIECE", 400)
    offload = ActivationOffload(torch.device("cuda"))

    def watch(*args: Any) -> None:
        held = [one.on_device is not None for one in offload.activations]
        on_device.append((len(held), sum(held)))

    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(watch)
    with driver, offload.of(model):
        found = gradients()
    assert not offload.activations
    assert all(map(torch.equal, found, expected))
    forward, backward = on_device[:5], on_device[5:]
    assert forward == [(layer, 1) for layer in range(1, 6)], "in the forward pass an input leaves while its layer works"
    assert backward == [(4, 1), (3, 1), (2, 1), (1, 1), (0, 0)], "and the next one returns in the backward pass"
