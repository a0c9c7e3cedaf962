"""The exact update against stock TRL, and what it does when something goes wrong."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOTrainer

from benchmarks.exactness import CASES, compare
from grpo.trainer import DoesNotFit, ExactGRPOTrainer, Update
from tests.stock_trl import make, relative_difference, reward, train

SMALL = Update(max_tokens_per_microbatch=100, share_prompts=False)  # several micro-batches a step
TRL_METRICS = ("loss", "grad_norm", "entropy", "kl", "clip_ratio/", "cispo_clip_ratio", "vespo/", "policy_loss")


def ours(folder: Path, update: Update = SMALL, **options: Any) -> ExactGRPOTrainer:
    trainer = make(ExactGRPOTrainer, folder, update=update, **options)
    assert isinstance(trainer, ExactGRPOTrainer)
    return trainer


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


def test_clip_ratios_count_skipped_rows_and_entropy_is_named_for_what_it_is_over() -> None:
    compared = compare({"num_iterations": 2, "epsilon": 0.01, "max_steps": 4})
    for mine, stock in zip(compared.ours.logs, compared.theirs.logs, strict=True):
        assert mine["update/rows_skipped"] > 0
        for name in stock:
            if name.startswith("clip_ratio/"):
                assert mine[name] == pytest.approx(stock[name], rel=1e-3, abs=1e-6), name
        assert "entropy" not in mine
        assert mine["update/entropy"] > 0
    assert compared.ours.logs[-1]["clip_ratio/region_mean"] > 0


def test_rows_are_skipped_only_where_the_advantage_is_all_that_acts(tmp_path: Path) -> None:
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


def test_importance_weights_are_exactly_one_until_the_policy_changes(tmp_path: Path) -> None:
    """As in TRL, where the same row is computed twice in the same way; here rounding would differ."""
    trainer = ours(tmp_path, num_iterations=2, importance_sampling_level="sequence", epsilon=1e-5, learning_rate=0.0)
    score_all = trainer._score_all

    def rounded(*args: Any) -> Any:
        logps, entropies = score_all(*args)
        return logps + 1e-2 * torch.randn(logps.shape, generator=torch.Generator().manual_seed(0)), entropies

    trainer._score_all = rounded
    first, second = train(trainer).logs
    assert first["clip_ratio/region_mean"] == 0
    assert second["clip_ratio/region_mean"] > 0


# --- Memory runs out ---


class OutOfMemory:
    """Raises as a GPU does, at certain calls."""

    def __init__(self, *calls: int) -> None:
        self.calls, self.count, self.raised = calls, 0, 0

    def __call__(self, *args: Any) -> None:
        self.count += 1
        if self.count in self.calls:
            self.raised += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize(("budget", "passes"), [(100, (1,)), (100, (3,)), (100, (6,)), (400, (1, 2, 3)), (100, (1, 4))])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("share", [False, True])
def test_the_gradient_is_the_same_after_memory_ran_out(
    tmp_path: Path, where: str, budget: int, passes: tuple[int, ...], share: bool
) -> None:
    budget = budget // 3 if share else budget  # several micro-batches all the same
    update = Update(budget, skip_zero_advantage=False, share_prompts=share)
    untouched = train(ours(tmp_path, update, loss_type="grpo"))
    assert (
        share or budget > 100 or untouched.logs[0]["update/microbatches"] == 6
    )  # so 1, 3, 6 are first, middle and last
    trainer = ours(tmp_path, update, loss_type="grpo")
    fault = OutOfMemory(*passes)
    layer = trainer.model.model.layers[0]
    if where == "forward":
        layer.register_forward_pre_hook(fault)
    else:
        layer.register_full_backward_pre_hook(fault)
    faulty = train(trainer)
    assert fault.raised == len(passes)
    assert sum(row["update/oom_retries"] for row in faulty.logs) == len(passes)
    assert faulty.logs[1]["update/max_tokens_per_microbatch"] <= budget / 2 ** len(passes)
    for mine, stock in zip(faulty.gradients, untouched.gradients, strict=True):
        assert relative_difference(mine, stock) <= 1e-5


@pytest.mark.parametrize("passes", [(1,), (2, 3)])
def test_the_gradient_is_the_same_after_memory_ran_out_in_the_log_probabilities(
    tmp_path: Path, passes: tuple[int, ...]
) -> None:
    options = {"beta": 0.04, "num_iterations": 2}
    untouched = train(ours(tmp_path, Update(400, share_prompts=False), **options))
    trainer = ours(tmp_path, Update(400, share_prompts=False), **options)
    fault = OutOfMemory(*passes)
    trainer.ref_model.model.layers[0].register_forward_pre_hook(fault)
    faulty = train(trainer)
    assert fault.raised == len(passes)
    assert faulty.logs[0]["update/oom_retries"] == len(passes)
    for mine, stock in zip(faulty.gradients, untouched.gradients, strict=True):
        assert relative_difference(mine, stock) <= 1e-5


def test_adaptive_entropy_is_not_counted_twice_when_a_step_is_done_again(tmp_path: Path) -> None:
    options = {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 5.0, "max_steps": 1}
    measured = []
    for calls in ((), (3,)):
        trainer = ours(tmp_path, **options)
        trainer.model.model.layers[0].register_full_backward_pre_hook(OutOfMemory(*calls))
        record = train(trainer)
        measured.append((trainer._last_world_entropy, record.logs[0]["entropy_coef"]))
        assert record.logs[0]["update/oom_retries"] == len(calls)
    assert measured[1] == pytest.approx(measured[0], rel=1e-6)
    assert measured[0][1] > 0.01


def test_a_row_that_does_not_fit_alone_ends_the_run_with_what_to_change(tmp_path: Path) -> None:
    trainer = ours(tmp_path)
    trainer.model.model.layers[0].register_forward_pre_hook(OutOfMemory(*range(1, 1000)))
    with pytest.raises(
        DoesNotFit, match=r"single sequence of \d+ prompt and \d+ completion tokens.*max_completion_length"
    ):
        trainer.train()


def test_a_loss_that_cannot_be_divided_says_what_to_do_when_it_does_not_fit(tmp_path: Path) -> None:
    trainer = ours(tmp_path, top_entropy_quantile=0.2)
    trainer.model.model.layers[0].register_forward_pre_hook(OutOfMemory(1))
    with pytest.raises(DoesNotFit, match="lower per_device_train_batch_size and raise gradient_accumulation_steps"):
        trainer.train()


def test_on_oom_raise_leaves_the_error_to_the_caller(tmp_path: Path) -> None:
    trainer = ours(tmp_path, Update(on_oom="raise"))
    trainer.model.model.layers[0].register_forward_pre_hook(OutOfMemory(1))
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()


def test_other_errors_are_not_taken_for_lack_of_memory(tmp_path: Path) -> None:
    trainer = ours(tmp_path)

    def broken(*args: Any) -> None:
        raise RuntimeError("shapes cannot be multiplied")

    trainer.model.model.layers[0].register_forward_pre_hook(broken)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        trainer.train()


def test_auto_tries_the_longest_possible_row_first_and_its_gradient_is_nothing(tmp_path: Path) -> None:
    untouched = train(ours(tmp_path, beta=0.04))
    trainer = ours(tmp_path, beta=0.04)
    trainer.budget.begun = False  # as `auto` on a card
    lengths = []
    trainer.model.model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    faulty = train(trainer)
    prompts = trainer.processing_class(list(trainer.train_dataset["prompt"]))["input_ids"]
    assert lengths[0][0] == 1
    assert lengths[0][1] - trainer.max_completion_length in {len(ids) for ids in prompts}
    assert lengths[0][1] >= max(shape[1] for shape in lengths)
    assert faulty.logs[0]["update/max_tokens_per_microbatch"] == lengths[0][1]
    for mine, stock in zip(faulty.gradients, untouched.gradients, strict=True):
        assert relative_difference(mine, stock) <= 1e-5


@pytest.mark.parametrize(
    "options",
    [{"num_iterations": 2}, {"beta": 0.04, "length": lambda generator: 1}],
    ids=["two iterations", "completions of one token"],
)
def test_the_step_after_the_trial_survives_lack_of_memory(tmp_path: Path, options: dict[str, Any]) -> None:
    untouched = train(ours(tmp_path, **options))
    trainer = ours(tmp_path, **options)
    trainer.budget.begun = False
    trainer.model.model.layers[0].register_full_backward_pre_hook(OutOfMemory(2))
    faulty = train(trainer)
    assert faulty.logs[0]["update/oom_retries"] == 1
    for mine, stock in zip(faulty.gradients, untouched.gradients, strict=True):
        assert relative_difference(mine, stock) <= 1e-5


def test_generation_that_does_not_fit_is_split_between_prompts(tmp_path: Path) -> None:
    options = {"rollout_func": None, "top_k": 1, "gradient_checkpointing": True}
    completions: dict[str, list[str]] = {}
    sizes: list[int] = []
    for name in ("whole", "split"):
        trainer = ours(tmp_path, **options)
        generate = trainer.model.generate

        def within_memory(generate: Callable = generate, limit: int = 4 if name == "split" else 99, **inputs: Any):
            sizes.append(inputs["input_ids"].size(0))
            if sizes[-1] > limit:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return generate(**inputs)

        trainer.model.generate = within_memory
        record = train(trainer)
        completions[name] = list(trainer._logs["completion"])
    assert completions["whole"] == completions["split"]
    assert sizes == [16, 16, 16, 8, 4, 4, 4, 4, 4, 4, 4, 4]
    assert [row["update/oom_retries"] for row in record.logs] == [2, 0]
    assert trainer.model.is_gradient_checkpointing


def test_a_completion_that_cannot_be_generated_alone_ends_the_run_with_what_to_change(tmp_path: Path) -> None:
    trainer = ours(tmp_path, rollout_func=None)
    fault = OutOfMemory(*range(1, 100))
    trainer.model.generate = lambda **inputs: fault()
    with pytest.raises(DoesNotFit, match=r"1 completions do not fit .* generated: lower max_completion_length"):
        trainer.train()


# --- Numbers that are not finite ---


class States(TrainerCallback):
    """Weights and the optimizer's state before and after each step."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self.trainer, self.before, self.after = trainer, [], []

    def _copy(self) -> list[torch.Tensor]:
        optimizer = self.trainer.optimizer.state_dict()["state"]
        tensors = [value for state in optimizer.values() for value in state.values() if torch.is_tensor(value)]
        return [tensor.clone() for tensor in (*self.trainer.model.state_dict().values(), *tensors)]

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.before.append(self._copy())

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.after.append(self._copy())

    def same(self, step: int) -> bool:
        pairs = zip(self.before[step], self.after[step], strict=True)
        return all(torch.equal(old, new) for old, new in pairs)


def spoil(trainer: ExactGRPOTrainer, what: str, active: Callable[[], bool]) -> list[str]:
    """Make something infinite or not a number while `active`; return the texts of the rows, where that is one row."""
    spoilt: list[str] = []
    if what == "reward":
        reward = trainer.reward_funcs[0]

        def infinite(**kwargs: Any) -> list[float]:
            return [math.inf if active() and row == 3 else value for row, value in enumerate(reward(**kwargs))]

        trainer.reward_funcs[0] = infinite
        trainer.scale_rewards = "none"
    elif what == "loss":
        compute = trainer._compute_loss
        trainer._compute_loss = lambda *args: compute(*args) * (math.nan if active() else 1.0)
    elif what == "logps":
        compute_logps = GRPOTrainer._get_per_token_logps_and_entropies

        def one_row(model: Any, ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            logps, entropies, aux = compute_logps(trainer, model, ids, *args, **kwargs)
            if active() and not spoilt:
                logps = torch.cat([logps[:1] * math.nan, logps[1:]])
                spoilt.append(trainer.processing_class.decode(ids[0]))
            trainer._logps = logps.detach()
            return logps, entropies, aux

        trainer._get_per_token_logps_and_entropies = one_row
    else:
        weight = trainer.model.model.layers[1].mlp.up_proj.weight
        weight.register_hook(lambda grad: grad.fill_(math.inf) if active() else grad)
    return spoilt


@pytest.mark.parametrize("optimizer", ["adamw_torch", "adamw_8bit"])
@pytest.mark.parametrize("what", ["reward", "loss", "logps", "gradient"])
def test_a_step_that_is_not_finite_changes_nothing(tmp_path: Path, what: str, optimizer: str) -> None:
    trainer = ours(tmp_path, max_steps=3, weight_decay=0.1, optim=optimizer, max_grad_norm=1.0)
    spoilt = spoil(trainer, what, active=lambda: trainer.state.global_step == 1)
    states = States(trainer)
    trainer.add_callback(states)
    record = train(trainer)
    assert [states.same(step) for step in range(3)] == [False, True, False]
    assert [row["update/steps_skipped"] for row in record.logs] == [0, 1, 0]
    assert all(bool(value.isfinite().all()) for value in trainer.model.state_dict().values())
    rows = [json.loads(line) for line in (tmp_path / "skipped_rows.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows} == {2}
    assert {"prompt", "completion", "advantage", "loss_tokens"} <= set(rows[0])
    if what == "logps":
        (row,) = rows
        assert row["prompt"] + row["completion"] == spoilt[0].replace("<pad>", "")
    assert trainer.stop_reason is None


def test_a_reward_that_is_not_a_number_is_left_out_as_in_trl(tmp_path: Path) -> None:
    values = [math.nan, 1.0, 0.0, None]
    trainer = ours(tmp_path, reward_funcs=lambda prompts, **kwargs: values * (len(prompts) // 4))
    record = train(trainer)
    assert all(row["update/rows_skipped"] >= 8 and math.isfinite(row["grad_norm"]) for row in record.logs)


def test_after_too_many_skipped_steps_the_run_stops_with_a_checkpoint_and_advice(tmp_path: Path) -> None:
    trainer = ours(
        tmp_path, Update(100, max_skipped_steps=2), max_steps=9, save_strategy="steps", save_steps=100, beta=0.04
    )
    spoil(trainer, "loss", active=lambda: trainer.state.global_step > 0)
    record = train(trainer)
    assert trainer.state.global_step == 3
    assert trainer.stop_reason is not None
    assert "step 3 is not finite, number 2 in a row" in trainer.stop_reason
    for word in ("skipped_rows.jsonl", "learning_rate", "max_grad_norm", "adam_beta2", "data"):
        assert word in trainer.stop_reason
    assert (tmp_path / "checkpoint-3" / "trainer_state.json").exists()
    assert [row["update/steps_skipped"] for row in record.logs] == [0, 1, 1]


def test_a_loss_scale_that_is_still_too_high_does_not_stop_the_run(tmp_path: Path) -> None:
    """As in float16: the scaler halves its scale at each step that overflows, until it fits."""
    large = {"scale_rewards": "none", "reward_funcs": lambda **columns: [64 * value for value in reward(**columns)]}
    trainer = ours(tmp_path, Update(100, max_skipped_steps=2), max_steps=10, max_grad_norm=1.0, **large)
    scaler = trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    # what accelerate does before it clips, under fp16, which it has on GPUs only
    trainer.accelerator.unscale_gradients = lambda: scaler.unscale_(trainer.optimizer.optimizer)
    record = train(trainer)
    skipped = [row["update/steps_skipped"] for row in record.logs]
    assert skipped[:3] == [1, 1, 1]
    assert 0 in skipped
    assert trainer.stop_reason is None


def test_skipped_steps_that_are_not_in_a_row_do_not_stop_the_run(tmp_path: Path) -> None:
    trainer = ours(tmp_path, Update(100, max_skipped_steps=2), max_steps=6)
    spoil(trainer, "gradient", active=lambda: trainer.state.global_step % 2 == 1)
    record = train(trainer)
    assert trainer.stop_reason is None
    assert [row["update/steps_skipped"] for row in record.logs] == [0, 1, 0, 1, 0, 1]


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
def test_an_evaluation_between_steps_leaves_the_old_log_probabilities_of_the_rollouts(tmp_path: Path, reuse) -> None:
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


@pytest.mark.parametrize("optimizer", ["galore_adamw_layerwise", "apollo_adamw_layerwise"])
def test_optimizers_that_step_in_the_backward_pass_step_once_a_step(tmp_path: Path, optimizer: str) -> None:
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
    assert trainer._slices
    trainer.generations = -1  # the rollouts of `tests.stock_trl` count them
    again = train(trainer)
    for gradient, first in zip(again.gradients, untouched.gradients, strict=True):
        assert relative_difference(gradient, first) <= 1e-6
