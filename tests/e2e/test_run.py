"""Whole runs in this process, with the shipped policy and TRL: a few small steps each."""

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo.config.check import check
from grpo.config.resolve import resolve
from grpo.config.schema import ROOT
from grpo.extras.testing.commands import command
from grpo.planning.fit import make_plan
from grpo.run.session import run
from grpo.rundir.run_dir import read_run
from grpo.utils.errors import ConfigError, RunError

SMALL = [
    "train.max_steps=2",
    "train.per_device_train_batch_size=8",
    "train.num_generations=4",
    "task.dataset.size=64",
    "task.eval.size=8",
]
ELSEWHERE = ("async", "fp16")
"""Recipes that need a vLLM server or a GPU."""
RECIPES = sorted(path.stem for path in (ROOT / "conf" / "train").glob("*.yaml") if path.stem not in ELSEWHERE)
Compose = Callable[..., DictConfig]


def train(composed: Compose, run_dir: Path, *overrides: str) -> dict[str, Any]:
    config = composed(*SMALL, *overrides)
    check(config)
    run_dir.mkdir(exist_ok=True)
    return run(resolve(config, None), run_dir)


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def test_a_run_leaves_what_the_run_directory_promises(
    composed: Compose, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    summary = train(composed, tmp_path, "train.num_completions_to_print=2")
    assert summary == json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", 2)
    assert summary["versions"]["trl"]
    evaluation = json.loads((tmp_path / "evaluation.json").read_text())
    for when in ("before", "after"):
        low, high = evaluation[when]["interval"]
        assert low <= evaluation[when]["accuracy"] <= high
        assert (evaluation[when]["samples"], summary[f"accuracy_{when}"]) == (8, evaluation[when]["accuracy"])
    rows = metrics(tmp_path)
    assert [row["step"] for row in rows] == [1, 2]
    assert {"reward", "rewards/correctness/mean", "completions/mean_length", "memory/host_gb"} <= set(rows[0])
    assert len(list((tmp_path / "completions").glob("*.parquet"))) == 2
    completions = pandas.read_parquet(tmp_path / "completions" / "completions_00001.parquet")
    assert {"prompt", "completion", "correctness", "advantage"} <= set(completions.columns)
    assert (tmp_path / "checkpoint-2" / "trainer_state.json").exists()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("Mia")["input_ids"]
    before = AutoModelForCausalLM.from_pretrained(ROOT / "grpo" / "builtin" / "tiny", dtype="float32").state_dict()
    assert any(not torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not list((tmp_path / "model").glob("*.bin"))
    assert not (tmp_path / "README.md").exists()

    printed = capfd.readouterr()
    assert "accuracy before" in printed.out
    assert "accuracy after" in printed.out
    assert "step 1/2  reward" in printed.err
    chatter = printed.out + printed.err
    assert "Loading weights" not in chatter
    assert "─ Step 1 ─" not in chatter
    assert "─ Step 1 ─" in (tmp_path / "train.log").read_text()


def test_the_resolved_configuration_is_saved_as_it_ran(composed: Compose, tmp_path: Path) -> None:
    config = composed(*SMALL, "generation=auto", "task.eval.size=0", "train.max_steps=1")
    composed_before = config.copy()
    plan = make_plan(config)
    run(resolve(config, plan), tmp_path, plan)
    assert config == composed_before
    assert config.train.use_vllm is None
    resolved = OmegaConf.load(tmp_path / "resolved_config.yaml")
    assert (resolved.train.use_vllm, resolved.train.vllm_enable_sleep_mode) == (False, False)
    assert resolved.train.num_generations == 4
    (tmp_path / ".hydra").mkdir()
    OmegaConf.save(config, tmp_path / ".hydra" / "config.yaml")
    (tmp_path / ".hydra" / "overrides.yaml").write_text("[]")
    assert read_run(tmp_path).config == resolved


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_trains(composed: Compose, tmp_path: Path, recipe: str) -> None:
    fewer = ["rollout.pass_at_k=2"] if recipe == "pass_at_k" else []  # than the completions of a group
    assert train(composed, tmp_path, f"train={recipe}", "task.eval.size=0", *fewer)["status"] == "completed"
    assert all(row["grad_norm"] >= 0 for row in metrics(tmp_path))


@pytest.mark.parametrize(
    "override", ["train.optim=adamw_8bit", "train.loss_type=dr_grpo", "train.gradient_checkpointing=true"]
)
def test_other_choices_train(composed: Compose, tmp_path: Path, override: str) -> None:
    assert train(composed, tmp_path, override)["status"] == "completed"


def test_a_reference_policy_gives_a_divergence(composed: Compose, tmp_path: Path) -> None:
    train(composed, tmp_path, "train.beta=0.04", "task.eval.size=0")
    first, second = metrics(tmp_path)
    assert first["kl"] == pytest.approx(0, abs=1e-6)
    assert second["kl"] > 0


def test_eight_bit_adamw_keeps_its_state_in_bytes(composed: Compose, tmp_path: Path) -> None:
    train(composed, tmp_path, "train.optim=adamw_8bit", "task.eval.size=0")
    state = torch.load(tmp_path / "checkpoint-2" / "optimizer.pt", weights_only=True)["state"]
    kept = [values["__bnb_optimizer_quant_state__"]["state1"].dtype for values in state.values()]
    assert torch.uint8 in kept  # the matrices
    assert torch.float32 in kept  # the small tensors


@pytest.mark.parametrize("peft", ["lora", "qlora"])
def test_an_adapter_is_what_comes_out(composed: Compose, tmp_path: Path, peft: str) -> None:
    assert train(composed, tmp_path, f"peft={peft}", "train.max_steps=3")["status"] == "completed"
    adapter = weights(tmp_path / "model")
    assert adapter
    assert all("lora_" in name for name in adapter)
    # `lora_B` starts at zero: what is not zero has been learned.
    assert any(value.abs().max() > 0 for name, value in adapter.items() if "lora_B" in name)
    assert AutoPeftModelForCausalLM.from_pretrained(tmp_path / "model")


def qlora(composed: Compose, folder: Path) -> torch.nn.Module:
    from grpo.data.task import load_task
    from grpo.model import policy
    from grpo.run.trainer import make_trainer
    from grpo.tools.running import Tools
    from rewards.isolation.reward import Reward

    config = composed(*SMALL, "peft=qlora")
    rewards = {"correctness": Reward("rewards.correctness.correctness", "correctness")}
    processing_class = policy.load_processing_class(config.model)
    return make_trainer(resolve(config, None), folder, load_task(config.task), processing_class, rewards, Tools()).model


def test_qlora_holds_its_base_in_four_bits(composed: Compose, tmp_path: Path) -> None:
    model = qlora(composed, tmp_path)
    kinds = {type(module).__name__ for module in model.modules()}
    assert "Linear4bit" in kinds


def test_four_bit_weights_pass_gradients_on_after_a_rollout(composed: Compose, tmp_path: Path) -> None:
    model = qlora(composed, tmp_path)
    ids = torch.arange(3, 40)[None]

    def gradients() -> dict[str, torch.Tensor]:
        model.train()
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    before = gradients()
    model.eval()
    model.generate(input_ids=ids, max_new_tokens=2)
    for name, gradient in gradients().items():
        assert torch.equal(gradient, before[name]), name


def test_a_conversational_task_goes_through_the_chat_template(composed: Compose, tmp_path: Path) -> None:
    train(composed, tmp_path, "task.conversational=true", "task.prompt='{question}'")
    completions = pandas.read_parquet(tmp_path / "completions" / "completions_00001.parquet")
    assert completions["prompt"][0][0]["role"] == "user"
    assert completions["completion"][0][0]["role"] == "assistant"


def test_a_reward_of_ones_own_stands_beside_correctness(composed: Compose, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def brevity(completions, limit, **columns):\n    return [-len(text) / limit for text in completions]\n"
    )
    train(
        composed,
        tmp_path,
        f"+reward.short.fn={tmp_path / 'mine.py'}:brevity",
        "+reward.short.weight=0.5",
        "+reward.short.kwargs={limit: 100}",
        "task.eval.size=0",
    )
    row = metrics(tmp_path)[0]
    assert row["rewards/short/mean"] < 0
    assert row["reward"] == pytest.approx(row["rewards/correctness/mean"] + 0.5 * row["rewards/short/mean"], abs=1e-5)


def test_a_continued_run_ends_like_one_that_was_not_interrupted(
    composed: Compose, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    common = ["train.max_steps=4", "train.save_steps=2", "task.eval.size=4"]
    train(composed, whole, *common)
    train(composed, broken, *common)
    for path in [broken / "checkpoint-4" / "optimizer.pt", broken / "summary.json"]:
        path.unlink()  # as if the machine had gone down while the last checkpoint was written
    summary = train(composed, broken, *common, "train.resume_from_checkpoint=auto")
    assert (summary["status"], summary["steps"]) == ("completed", 4)
    assert [row["step"] for row in metrics(broken)] == [1, 2, 3, 4]
    assert "resuming from " in (said := capfd.readouterr().err)
    assert "broken/checkpoint-2" in said
    for name, value in weights(whole / "model").items():
        assert torch.equal(value, weights(broken / "model")[name]), name


def test_a_signal_ends_a_run_with_a_resumable_checkpoint(composed: Compose, tmp_path: Path) -> None:
    def interrupt() -> None:
        while not (tmp_path / "metrics.jsonl").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt, daemon=True).start()
    size = "task.dataset.size=400"
    summary = train(composed, tmp_path, "train.max_steps=200", size)
    assert summary["status"] == "stopped"
    assert summary["reason"].startswith("SIGTERM after step ")
    assert (tmp_path / f"checkpoint-{summary['steps']}").is_dir()
    steps = f"train.max_steps={summary['steps'] + 1}"
    assert train(composed, tmp_path, steps, size, "train.resume_from_checkpoint=auto")["status"] == "completed"


@pytest.fixture
def picky(tmp_path: Path) -> str:
    """A reward that fails on some completions of the embedded policy."""
    file = tmp_path / "mine.py"
    file.write_text(
        "def picky(completions, answer, **columns):\n"
        "    if any(right in said for said, right in zip(completions, answer)):\n"
        "        raise KeyError('level')\n"
        "    return [1.0] * len(completions)\n"
    )
    return f"+reward.mine.fn={file}:picky"


def test_a_run_skips_rows_that_a_reward_fails_on_and_continues(
    composed: Compose, tmp_path: Path, picky: str, capfd: pytest.CaptureFixture[str]
) -> None:
    summary = train(composed, tmp_path / "run", picky, "train.max_steps=3")
    assert summary["status"] == "completed"
    errors = [row["rewards/mine/errors"] for row in metrics(tmp_path / "run")]
    assert sum(errors) == summary["reward_errors"]["mine"]["KeyError"] > 0
    assert all(row["rewards/correctness/errors"] == 0 for row in metrics(tmp_path / "run"))
    rows = pandas.concat(pandas.read_parquet(path) for path in (tmp_path / "run" / "completions").glob("*.parquet"))
    failed = rows["mine"].isna()
    assert failed.sum() == sum(errors)
    assert rows["correctness"][failed].isna().all()  # the row is left out, and does not count as 0
    assert (rows["advantage"][failed] == 0).all()
    kept = (tmp_path / "run" / "reward_errors.jsonl").read_text().splitlines()
    assert len(kept) == 1  # the first of its kind
    assert "answer" in json.loads(kept[0])["row"]
    printed = capfd.readouterr()
    assert "reward errors" in printed.err
    assert "skipped:" in printed.out


def test_a_reward_set_to_raise_ends_the_run_with_the_row_saved(
    composed: Compose, tmp_path: Path, picky: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RunError, match=r"failed: reward\.mine: KeyError: 'level' .*; the completion is in .*jsonl"):
        train(composed, tmp_path / "run", picky, "+reward.mine.on_error=raise", "train.max_steps=9")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert summary["reason"].startswith("reward.mine: KeyError: 'level' (")
    assert json.loads((tmp_path / "run" / "reward_errors.jsonl").read_text())["row"]["completions"]
    assert "mine.py" in caplog.text  # the traceback


def test_a_reward_that_fails_on_every_completion_fails_the_run(composed: Compose, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def fails(completions):\n    return [1 / 0 for _ in completions]\n")
    reason = r"reward\.mine: failed on every completion: ZeroDivisionError: .*; the completion is in .*jsonl"
    with pytest.raises(RunError, match=f"failed: {reason}"):
        train(composed, tmp_path / "run", f"+reward.mine.fn={tmp_path}/mine.py:fails")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["accuracy_after"]) == ("failed", 2, None)
    assert re.match(reason, summary["reason"])


def test_a_reward_that_hangs_does_not_freeze_the_run(composed: Compose, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import re\ndef stuck(completions):\n    return [re.match('(a+)+$', 'a' * 50 + 'b') for _ in completions]\n"
    )
    overrides = [f"+reward.mine.fn={tmp_path}/mine.py:stuck", "+reward.mine.timeout=0.2", "train.max_steps=1"]
    with pytest.raises(RunError, match=r"reward\.mine: failed on every completion: "):
        train(composed, tmp_path / "run", *overrides)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["reward_errors"] == {"mine": {"Timeout": 8}}
    assert metrics(tmp_path / "run")[0]["reward"] is None  # every row is left out


def test_a_missing_column_for_a_reward_fails_with_one_line(composed: Compose, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def mine(completions, level):\n    return [0.0] * len(completions)\n")
    with pytest.raises(ConfigError, match=r"reward\.mine: needs a column level; the data has: question, answer, steps"):
        train(composed, tmp_path / "run", f"+reward.mine.fn={tmp_path}/mine.py:mine")
    with pytest.raises(ConfigError, match=r"reward\.steps: the data has a column of this name"):
        train(composed, tmp_path / "run", f"+reward.steps.fn={tmp_path}/mine.py:mine")


def test_completions_are_kept_with_the_columns_of_their_rows(composed: Compose, tmp_path: Path) -> None:
    train(composed, tmp_path, "task.eval.size=0")
    kept = pandas.read_parquet(tmp_path / "completions" / "completions_00001.parquet")
    assert {"prompt", "completion", "correctness", "question", "answer", "steps"} <= set(kept.columns)
    again = command("rewards.check", "correctness", "--run", tmp_path, cwd=ROOT)
    assert "0 of 16 completions get another reward" in again.stdout


def test_what_the_run_says_is_right_is_what_the_evaluation_says(composed: Compose, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def always(completions):\n    return [1.0] * len(completions)\n")
    overrides = [f"+reward.always.fn={tmp_path}/mine.py:always", "task.eval.reward=always"]
    assert train(composed, tmp_path / "run", *overrides)["accuracy_after"] == 1
    said = (tmp_path / "run" / "evaluation_after.jsonl").read_text().splitlines()
    assert len(said) == 8
    with pytest.raises(ConfigError, match=r"task\.eval\.reward=brevity: it needs completion_ids"):
        train(composed, tmp_path / "third", "task.eval.reward=brevity")
    with pytest.raises(ConfigError, match=r"task\.eval\.reward=nothing: neither a reward of this run nor one"):
        train(composed, tmp_path / "other", "task.eval.reward=nothing")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["train.lr_scheduler_type=constnat"], "constnat"),
        (["reward=[]", "+reward.mine.fn=rewards.nothing.f"], "No module named 'rewards.nothing'"),
    ],
)
def test_what_the_libraries_refuse_is_one_line(
    composed: Compose, tmp_path: Path, overrides: list[str], says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        train(composed, tmp_path, *overrides)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"


def test_a_file_smaller_than_a_batch_fails_with_one_line(composed: Compose, tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text('{"question": "1 plus 1", "answer": "#### 2"}\n')
    overrides = ["task=gsm8k", "task.dataset.path=json", "task.dataset.name=null", "task.eval.size=0"]
    overrides += [f"+task.dataset.data_files={tmp_path}/one.jsonl", "task.conversational=false"]
    overrides += ["train.per_device_train_batch_size=8", "train.num_generations=4"]
    with pytest.raises(ConfigError, match="1 problems to train on, and a batch takes 2"):
        run(resolve(composed(*overrides), None), tmp_path)


def test_the_update_group_reaches_the_trainer_and_the_metrics(composed: Compose, tmp_path: Path) -> None:
    train(composed, tmp_path, "update.max_tokens_per_microbatch=64", "update.skip_zero_advantage=false")
    for row in metrics(tmp_path):
        assert row["update/max_tokens_per_microbatch"] == 64
        assert (row["update/rows_skipped"], row["update/oom_retries"], row["update/steps_skipped"]) == (0, 0, 0)
        assert row["update/microbatches"] > 1
        assert all(row[f"time/{phase}"] >= 0 for phase in ("generate", "reward", "logprobs", "update"))


def test_non_finite_gradients_stop_a_run_with_a_checkpoint(composed: Compose, tmp_path: Path) -> None:
    (tmp_path / "infinite.py").write_text("def reward(completions, **columns):\n    return [3e38, -3e38] * 4\n")
    overrides = [f"+reward.infinite.fn={tmp_path}/infinite.py:reward", "train.scale_rewards=none"]
    overrides += ["update.max_skipped_steps=2", "train.max_steps=9"]
    before = AutoModelForCausalLM.from_pretrained(ROOT / "grpo" / "builtin" / "tiny", dtype="float32").state_dict()
    summary = train(composed, tmp_path / "run", *overrides)
    assert (summary["status"], summary["steps"]) == ("stopped", 2)
    assert "step 2 is not finite, number 2 in a row" in summary["reason"]
    assert "learning_rate" in summary["reason"]
    assert (tmp_path / "run" / "skipped_rows.jsonl").read_text().count("\n") > 0
    after = weights(tmp_path / "run" / "checkpoint-2")
    assert all(torch.equal(before[name], value) for name, value in after.items())


def test_a_row_that_fits_nowhere_ends_the_run_with_advice(
    composed: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr("grpo.trainer.ExactGRPOTrainer._compute_loss", no_memory)
    with pytest.raises(RunError, match=r"failed: a single sequence of .* does not fit into memory: lower max_compl"):
        train(composed, tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"
