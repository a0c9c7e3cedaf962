import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

from grpo.trainer import ExactGRPOTrainer, Update
from grpo.trainer.update.gradient_offload import OffloadedGradients
from tests.stock_trl import doubled, make, train

PARTS = Update(max_tokens_per_microbatch=100, share_prompts=False)  # several micro-batches a step, so sums


def trained(folder: Path, on_host: bool, **options: Any) -> tuple[ExactGRPOTrainer, list[dict[str, Any]]]:
    trainer = make(ExactGRPOTrainer, folder, update=replace(PARTS, gradients_on_host=on_host), **options)
    assert isinstance(trainer, ExactGRPOTrainer)
    logs = train(trainer).logs
    return trainer, logs


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_8bit", "adafactor"])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.01])
def test_weights_and_norms_are_bitwise_the_same(tmp_path: Path, optim: str, max_grad_norm: float) -> None:
    options = {"optim": optim, "max_grad_norm": max_grad_norm, "max_steps": 3, "lr_scheduler_type": "linear"}
    (plain, plain_logs), (waiting, logs) = (trained(tmp_path, on_host, **options) for on_host in (False, True))
    for name, weight in plain.model.state_dict().items():
        assert torch.equal(weight, waiting.model.state_dict()[name]), name
    assert [row["grad_norm"] for row in logs] == [row["grad_norm"] for row in plain_logs]
    assert [row["learning_rate"] for row in logs] == [row["learning_rate"] for row in plain_logs]


def test_the_optimizers_step_has_one_gradient_on_the_device(tmp_path: Path) -> None:
    seen = []

    class Count(TrainerCallback):
        def on_pre_optimizer_step(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
            seen.append(sum(weight.grad is not None for weight in model.parameters()))

    class Watched(torch.optim.SGD):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            seen.append(sum(weight.grad is not None for group in self.param_groups for weight in group["params"]))

    trainer = make(ExactGRPOTrainer, tmp_path, update=replace(PARTS, gradients_on_host=True), max_steps=1)
    trainer.optimizer = Watched(trainer.model.parameters(), lr=0.1)
    trainer.step_update.offloaded = OffloadedGradients(trainer.model, trainer.optimizer)
    trainer.add_callback(Count())
    trainer.train()
    weights = len(list(trainer.model.parameters()))
    assert seen == [0] + [1] * weights


def test_a_gradient_that_is_not_finite_changes_nothing(tmp_path: Path) -> None:
    trainer = make(ExactGRPOTrainer, tmp_path, update=replace(PARTS, gradients_on_host=True), max_steps=1)
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    trainer.model.lm_head.weight.register_hook(lambda gradient: gradient * math.nan)
    trainer.train()
    for name, weight in trainer.model.state_dict().items():
        assert torch.equal(weight, before[name]), name
    assert trainer.step_update.offloaded is not None
    assert not trainer.step_update.offloaded.waiting


def test_a_step_repeated_after_an_oom_has_the_same_gradient(tmp_path: Path) -> None:
    def run(failures: list[int]) -> dict[str, torch.Tensor]:
        trainer = make(
            ExactGRPOTrainer, tmp_path, update=replace(PARTS, gradients_on_host=True), max_steps=1, max_grad_norm=1.0
        )
        doubled(trainer)
        compute, calls = trainer.compute_loss, []

        def loss(*args: Any, **kwargs: Any) -> torch.Tensor:
            calls.append(1)
            if len(calls) in failures:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return compute(*args, **kwargs)

        trainer.compute_loss = loss  # type: ignore[method-assign]
        trainer.train()
        assert bool(failures) == (trainer.budget.tokens < 100)
        return trainer.model.state_dict()

    calm, troubled = run([]), run([3])
    for name, weight in calm.items():
        torch.testing.assert_close(weight, troubled[name], rtol=1e-5, atol=1e-7)


def test_the_norm_is_clipped_as_torch_clips_it() -> None:
    weights = nn.ParameterList([torch.ones(3), torch.ones(2, 2)])
    optimizer = torch.optim.SGD(weights, lr=1.0)
    gradients = OffloadedGradients(weights, optimizer)
    loss = (weights[0] * torch.tensor([1.0, -2.0, 3.0])).sum() + (weights[1] ** 2).sum()
    loss.backward()
    (2 * weights[0].sum()).backward()
    expected = [torch.tensor([3.0, 0.0, 5.0]), torch.full((2, 2), 2.0)]
    norm = gradients.clip(1.0)
    assert norm.item() == pytest.approx(math.sqrt(9 + 25 + 16))
    optimizer.step()
    for weight, gradient in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.detach(), 1 - gradient / norm, rtol=1e-5, atol=1e-7)


def test_it_is_refused_where_it_cannot_work(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one process, in bfloat16 or float32"):
        make(ExactGRPOTrainer, tmp_path, update=Update(gradients_on_host=True), optim="schedule_free_adamw")


class Stream:
    """A stream of CUDA that notes for which others it waits."""

    def __init__(self, name: str, happened: list[str]) -> None:
        self.name, self.happened = name, happened

    def wait_stream(self, other: "Stream") -> None:
        self.happened.append(f"{self.name} waits for {other.name}")


@pytest.mark.parametrize("on_host", [False, True])
def test_bitsandbytes_steps_after_clipping_before_the_next_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_host: bool
) -> None:
    """Its kernels run on CUDA's default stream, and vLLM moves the process to another one."""
    happened: list[str] = []
    current, default = Stream("current", happened), Stream("default", happened)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda: default)
    options = {"optim": "adamw_8bit", "max_grad_norm": 0.01, "max_steps": 1}
    trainer = make(ExactGRPOTrainer, tmp_path, update=replace(PARTS, gradients_on_host=on_host), **options)
    with monkeypatch.context() as on_a_gpu:
        on_a_gpu.setattr(type(trainer.accelerator), "device", torch.device("cuda"))
        trainer.create_optimizer()
    update = type(trainer.optimizer).update_step

    def noted(*args: Any) -> None:
        happened.append("step")
        update(*args)

    monkeypatch.setattr(type(trainer.optimizer), "update_step", noted)
    trainer.train()
    weights = len(list(trainer.model.parameters()))
    before, after = "default waits for current", "current waits for default"
    assert happened == ([before, "step", after] * weights if on_host else [before, *["step"] * weights, after])
