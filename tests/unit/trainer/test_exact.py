"""The exact update against stock TRL, and what it does when something goes wrong."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from trl import GRPOTrainer

from benchmarks.exactness import CASES, compare
from grpo.trainer import ExactGRPOTrainer, Update
from tests.stock_trl import SMALL, make, ours, relative_difference, train

TRL_METRICS = ("loss", "grad_norm", "entropy", "kl", "clip_ratio/", "cispo_clip_ratio", "vespo/", "policy_loss")


@pytest.mark.parametrize("case", CASES)
def test_gradient_and_weights_are_those_of_stock_trl(case: str) -> None:
    compared = compare(CASES[case])
    assert max(compared.gradients) <= 1e-5
    assert compared.weights <= 1e-6
    assert compared.moved > 1e-3 or case == "no advantage anywhere"


def test_twenty_steps_end_with_the_weights_of_stock_trl(tmp_path: Path) -> None:
    options = {"max_steps": 20, "gradient_accumulation_steps": 4, "per_device_train_batch_size": 4}
    theirs = make(GRPOTrainer, tmp_path, **options)
    train(theirs)
    trainer = ours(tmp_path, **options)
    train(trainer)
    assert relative_difference(trainer.model.state_dict(), theirs.model.state_dict()) < 1e-5


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "cispo", "vespo", "bnpo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_metrics_mean_what_they_mean_in_trl(loss_type: str, level: str) -> None:
    options = {"loss_type": loss_type, "importance_sampling_level": level, "num_iterations": 2, "beta": 0.04}
    compared = compare({**options, "entropy_coef": 0.01, "epsilon": 0.01, "max_steps": 4, "max_grad_norm": 1.0})
    for mine, stock in zip(compared.ours.logs, compared.theirs.logs, strict=True):
        for name in stock:
            if name.startswith(TRL_METRICS):
                assert mine[name] == pytest.approx(stock[name], rel=1e-3, abs=1e-5), name
        assert stock.keys() <= mine.keys()
    if loss_type == "grpo":
        assert compared.ours.logs[-1]["clip_ratio/region_mean"] > 0


@pytest.mark.parametrize("loss_type", ["grpo", "cispo"])
def test_metrics_of_a_step_without_a_token_in_the_loss_are_trls(loss_type: str) -> None:
    def truncated(prompts: list[str], trainer: Any) -> dict[str, Any]:
        return {"prompt_ids": [[4, 6]] * len(prompts), "completion_ids": [[5, 7]] * len(prompts), "logprobs": None}

    masked = {"mask_truncated_completions": True, "rollout_func": truncated, "beta": 0.04, "loss_type": loss_type}
    compared = compare(masked)
    for mine, stock in zip(compared.ours.logs, compared.theirs.logs, strict=True):
        for name, value in stock.items():
            if name.startswith(TRL_METRICS) and value is not None:  # of no sequence there is no extreme either
                assert mine[name] == value == 0.0, name


def test_clip_ratios_count_skipped_completions() -> None:
    compared = compare({"num_iterations": 2, "epsilon": 0.01, "max_steps": 4})
    for mine, stock in zip(compared.ours.logs, compared.theirs.logs, strict=True):
        assert mine["update/rows_skipped"] > 0
        for name in stock:
            if name.startswith("clip_ratio/"):
                assert mine[name] == pytest.approx(stock[name], rel=1e-3, abs=1e-6), name
        assert "entropy" not in mine
        assert mine["update/entropy"] > 0
    assert compared.ours.logs[-1]["clip_ratio/region_mean"] > 0


def test_completions_are_skipped_if_only_the_advantage_acts(tmp_path: Path) -> None:
    skipped = {}
    for name, options in {"none": {}, "kl": {"beta": 0.04}, "entropy": {"entropy_coef": 0.01}}.items():
        skipped[name] = train(ours(tmp_path, **options)).logs[0]["update/rows_skipped"]
    kept = train(ours(tmp_path, Update(skip_zero_advantage=False))).logs[0]
    assert skipped["none"] > 0
    assert (skipped["kl"], skipped["entropy"], kept["update/rows_skipped"]) == (0, 0, 0)
    assert "entropy" in kept


def test_times_and_the_update_are_logged(tmp_path: Path) -> None:
    row = train(ours(tmp_path, num_iterations=2)).logs[0]
    for name in ("generate", "reward", "logprobs", "update"):
        assert row[f"time/{name}"] > 0, name
    assert row["update/microbatches"] >= 2
    assert row["update/max_tokens_per_microbatch"] == 100
    assert (row["update/oom_retries"], row["update/steps_skipped"]) == (0, 0)
    assert row["step_time"] >= row["time/update"]


def test_importance_weights_are_one_until_the_policy_changes(tmp_path: Path) -> None:
    """As in TRL, where the same row is computed twice in the same way; here rounding would differ."""
    trainer = ours(tmp_path, num_iterations=2, importance_sampling_level="sequence", epsilon=1e-5, learning_rate=0.0)
    prepare = trainer._prepare_inputs

    def rounded(inputs: Any) -> Any:
        rollouts = dict(prepare(inputs))
        shape, generator = rollouts["old_per_token_logps"].shape, torch.Generator().manual_seed(0)
        rollouts["old_per_token_logps"] = rollouts["old_per_token_logps"] + 1e-2 * torch.randn(
            shape, generator=generator
        )
        return rollouts

    trainer._prepare_inputs = rounded
    first, second = train(trainer).logs
    assert first["clip_ratio/region_mean"] == 0
    assert second["clip_ratio/region_mean"] > 0


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"max_tokens_per_microbatch": "many"}, "max_tokens"),
        ({"on_oom": "ignore"}, "on_oom"),
        ({"max_skipped_steps": 0}, "max_sk"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Update(**settings)


@pytest.mark.parametrize("tokens", [1, 200])
def test_a_sequence_alone_needs_no_mask(tmp_path: Path, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    masked, attend = [], torch.nn.functional.scaled_dot_product_attention

    def noted(*args: Any, attn_mask: Any = None, **options: Any) -> torch.Tensor:
        masked.append(attn_mask is not None)
        return attend(*args, attn_mask=attn_mask, **options)

    trainer = ours(tmp_path, update=Update(max_tokens_per_microbatch=tokens, share_prompts=False), max_steps=1)
    trainer.packing.shared_prompts.decide()
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    trainer.train()
    assert any(masked) == (tokens > 1), "several of different lengths are padded"


def test_evaluation_during_training_works_as_in_trl(tmp_path: Path) -> None:
    logs = []
    for kind in (GRPOTrainer, ExactGRPOTrainer):
        options = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8, "beta": 0.04}
        trainer = make(kind, tmp_path, **options, eval_dataset=Dataset.from_dict({"prompt": ["How many ?", "1 2"]}))
        trainer.train()
        logs.append([row for row in trainer.state.log_history if "eval_reward" in row])
    for theirs, mine in zip(*logs, strict=True):
        for name in ("eval_loss", "eval_reward", "eval_entropy"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4), name


@pytest.mark.parametrize(
    "reuse",
    [
        {"num_iterations": 2},
        {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 8},
    ],
)
def test_an_evaluation_keeps_the_old_log_probabilities(tmp_path: Path, reuse) -> None:
    held_out = Dataset.from_dict({"prompt": ["How many ?", "1 2"]})
    options = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8, "max_steps": 4, **reuse}
    theirs = train(make(GRPOTrainer, tmp_path, eval_dataset=held_out, **options))
    mine = train(ours(tmp_path, eval_dataset=held_out, **options), start_from=theirs.weights)
    for gradient, stock in zip(mine.gradients, theirs.gradients, strict=True):
        assert relative_difference(gradient, stock) <= 1e-5


class Invented:
    """A loss that TRL does not have, and that is no sum over sequences or tokens."""

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        ids = torch.cat((inputs["prompt_ids"], inputs["completion_ids"]), dim=1)
        mask = torch.cat((inputs["prompt_mask"], inputs["completion_mask"]), dim=1)
        logps, _, _ = self._get_per_token_logps_and_entropies(model, ids, mask, inputs["completion_ids"].size(1))
        weighted = (logps * inputs["completion_mask"]).sum(1) * inputs["advantages"]
        return weighted.mean() ** 2


def test_an_unknown_loss_is_computed_undivided_as_trl_would(tmp_path: Path) -> None:
    options = {"loss_type": "invented", "beta": 0.0}
    theirs = train(make(type("Theirs", (Invented, GRPOTrainer), {}), tmp_path, **options))
    trainer = make(type("Ours", (Invented, ExactGRPOTrainer), {}), tmp_path, update=SMALL, **options)
    mine = train(trainer, start_from=theirs.weights)
    for gradient, stock in zip(mine.gradients, theirs.gradients, strict=True):
        assert relative_difference(gradient, stock) <= 1e-6


def test_an_undivided_loss_and_its_reference_are_padded_alike(tmp_path: Path) -> None:
    trainer = ours(tmp_path, Update(max_tokens_per_microbatch=100), top_entropy_quantile=0.2, beta=0.04)
    widths: dict[str, list[int]] = {"policy": [], "reference": []}
    for name, model in (("policy", trainer.model), ("reference", trainer.ref_model)):

        def note(*args: Any, of: list[int] = widths[name]) -> None:
            of.append(args[2]["input_ids"].size(1))

        model.model.register_forward_pre_hook(note, with_kwargs=True)
    trainer.train()
    assert len(widths["reference"]) > len(widths["policy"]) == 2
    assert set(widths["reference"]) == set(widths["policy"])


@pytest.mark.parametrize("optimizer", ["galore_adamw_layerwise", "apollo_adamw_layerwise"])
def test_optimizers_in_the_backward_pass_step_once_per_step(tmp_path: Path, optimizer: str) -> None:
    options = {"optim": optimizer, "optim_target_modules": ["mlp"], "max_steps": 2}
    theirs = make(GRPOTrainer, tmp_path, **options)
    start = {name: weight.clone() for name, weight in theirs.model.state_dict().items()}
    theirs.train()
    mine = ours(tmp_path, **options)
    mine.train()
    assert relative_difference(mine.model.state_dict(), theirs.model.state_dict()) <= 1e-6
    assert relative_difference(mine.model.state_dict(), start) > 1e-3


def test_nothing_of_a_step_that_failed_reaches_a_second_training(tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 4}
    untouched = train(ours(tmp_path, **options))
    trainer = ours(tmp_path, **options)
    prepare, calls = trainer._prepare_inputs, []

    def fail_at_the_third_slice(inputs: Any) -> Any:
        calls.append(inputs)
        if len(calls) == 3:
            raise RuntimeError("the network is down")
        return prepare(inputs)

    trainer._prepare_inputs = fail_at_the_third_slice
    with pytest.raises(RuntimeError, match="network"):
        trainer.train()
    assert trainer.slices
    trainer.generations = -1  # the rollouts of `tests.stock_trl` count them
    again = train(trainer)
    for gradient, first in zip(again.gradients, untouched.gradients, strict=True):
        assert relative_difference(gradient, first) <= 1e-6


def test_a_script_that_trains_loads_neither_hydra_nor_omegaconf() -> None:
    code = "import sys, grpo.trainer; print(sys.modules.keys() & {'hydra', 'omegaconf'})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"optim": "galore_adamw_layerwise", "optim_target_modules": ["mlp"]}, "_layerwise steps during the backward"),
        ({"optim": "schedule_free_adamw"}, "not with schedule_free optimizers"),
    ],
)
def test_optimizers_that_keep_no_gradients_offload_none(tmp_path: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ours(tmp_path, Update(gradients_on_host=True), **options)
