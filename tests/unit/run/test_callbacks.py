import io
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import DictConfig
from rich.console import Console
from transformers import EarlyStoppingCallback, TrainerControl, TrainerState

from grpo.run.callbacks import DiskGuard, HostMemoryGuard, MetricsFile, MismatchWarning, StopOnSignal, configured
from grpo.utils.errors import ConfigError, DirectoryLost

ARGUMENTS: Any = None  # which no callback of ours reads
LOGS = {"reward": 0.25, "rewards/correctness/mean": 0.5, "step_time": 1.25}


def state(step: int, steps: int = 100) -> TrainerState:
    return TrainerState(global_step=step, max_steps=steps)


def test_a_row_has_its_step_and_only_numbers_that_json_knows(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    MetricsFile(file).on_log(None, state(3), None, logs={**LOGS, "kl": float("nan"), "loss": float("inf")})
    row = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert (row["step"], row["reward"], row["kl"], row["loss"]) == (3, 0.25, None, None)


def test_only_steps_are_rows_and_only_one_process_writes_them(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    MetricsFile(file).on_log(None, state(3), None, logs={"train_runtime": 5})
    other = state(3)
    other.is_world_process_zero = False
    MetricsFile(file).on_log(None, other, None, logs=LOGS)
    assert not file.exists()


def test_a_continued_run_forgets_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    for step in (1, 2, 3):
        MetricsFile(file).on_log(None, state(step), None, logs=LOGS)
    MetricsFile(file).on_train_begin(None, state(2), None)
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 2]


def test_a_line_that_was_cut_off_is_forgotten_as_well(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2, "rew')
    MetricsFile(file).on_train_begin(None, state(2), None)
    assert file.read_text() == '{"step": 1}\n'


def test_a_signal_stops_after_the_step_and_a_second_one_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopOnSignal() as stop:
        stop.begin(None)
        quiet, told = TrainerControl(), TrainerControl()
        stop.on_step_end(None, state(1), quiet)
        assert not quiet.should_training_stop
        os.kill(os.getpid(), signal.SIGTERM)
        answer = "SIGTERM: stopping after this step, with a checkpoint; Ctrl-C stops at once"
        assert capfd.readouterr().err == f"{answer}\n", "before the step ends"
        stop.on_step_end(None, state(1), told)
        assert told.should_training_stop
        assert told.should_save
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert capfd.readouterr().err == ""
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_outside_the_training_interrupts_at_once(number: signal.Signals) -> None:
    with StopOnSignal() as stop:
        with pytest.raises(KeyboardInterrupt, match=f"{number.name} while loading"):
            os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)  # a second one leaves the time to write the outcome
    with StopOnSignal() as stop:
        stop.begin(None)
        os.kill(os.getpid(), number)
        with pytest.raises(KeyboardInterrupt, match=f"{number.name} before saving the model"):
            stop.begin("saving the model")


def test_a_run_under_nohup_hears_no_hangup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopOnSignal() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.received is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_run_stops_with_a_checkpoint_near_full_host_memory() -> None:
    enough, little = HostMemoryGuard(), HostMemoryGuard(limit_gb=0.1)
    quiet, told = TrainerControl(), TrainerControl()
    enough.on_step_end(None, state(7), quiet)
    little.on_step_end(None, state(7), told)
    assert (quiet.should_training_stop, quiet.should_save, enough.reason) == (False, False, None)
    assert (told.should_training_stop, told.should_save) == (True, True)
    assert little.reason is not None
    assert little.reason.startswith("host memory nearly used up after step 7: ")


@pytest.mark.parametrize(
    ("overrides", "first"),
    [
        ((), "weights in half precision"),
        (("generation=vllm_server",), "a server with another model, precision or --logprobs-mode"),
    ],
)
def test_a_mismatch_with_vllm_is_reported_once_with_its_causes(
    composed: Callable[..., DictConfig], overrides: tuple[str, ...], first: str
) -> None:
    said = io.StringIO()
    warning = MismatchWarning(Console(file=said, width=200), composed(*overrides).train)
    for step, difference in enumerate((0.02, 0.3, 0.4)):
        warning.on_log(None, state(step), None, logs={"sampling/sampling_logp_difference/mean": difference})
    warning.on_log(None, state(4), None, logs={"loss": 0.0})
    lines = said.getvalue().splitlines()
    assert len(lines) == 1
    assert "step 1: vLLM's log-probabilities differ from the policy's by 0.30 nats per token" in lines[0]
    assert f"; likely causes: {first}" in lines[0]


@pytest.mark.parametrize("made_again", [False, True])
def test_a_removed_or_replaced_run_directory_ends_the_run(tmp_path: Path, made_again: bool) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    guard = DiskGuard(run_dir, Console(quiet=True))
    guard.on_step_end(ARGUMENTS, TrainerState(), TrainerControl())
    run_dir.rmdir()
    if made_again:
        run_dir.mkdir()
    with pytest.raises(DirectoryLost, match="removed or replaced"):
        guard.on_step_end(ARGUMENTS, TrainerState(), TrainerControl())


def test_a_checkpoint_that_will_not_fit_is_announced_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "weights").write_bytes(bytes(5000))
    said = io.StringIO()
    console = Console(file=said, width=200)
    guard, state = DiskGuard(tmp_path, console), TrainerState(is_world_process_zero=True)
    state.global_step = 3
    guard.on_save(ARGUMENTS, state, TrainerControl())
    for free in (6000, 4000, 3000):
        monkeypatch.setattr("shutil.disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        guard.on_step_end(ARGUMENTS, state, TrainerControl())
        assert said.getvalue().count("make room before the next") == (free < 5000)


def test_callbacks_of_the_configuration_are_called(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from transformers import TrainerCallback\n"
        "class Mine(TrainerCallback):\n"
        "    def __init__(self, trainer, every=1):\n"
        "        self.trainer, self.every = trainer, every\n"
        "def off(trainer):\n"
        "    return None\n"
    )
    options = {
        "early": {"fn": "transformers.EarlyStoppingCallback", "kwargs": {"early_stopping_patience": 3}},
        "mine": {"fn": f"{file}:Mine", "kwargs": {"every": 7}},
        "off": {"fn": f"{file}:off"},
    }
    early, mine = configured(DictConfig(options), trainer="the trainer", more=1)
    assert isinstance(early, EarlyStoppingCallback)
    assert early.early_stopping_patience == 3
    assert (mine.trainer, mine.every) == ("the trainer", 7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fn": "transformers.Missing"}, "callbacks.a.fn: no function Missing in transformers"),
        ({"fn": "transformers.EarlyStoppingCallback", "kwargs": {"patience": 3}}, "callbacks.a: .*argument 'patience'"),
        ({"fn": "collections.Counter"}, "callbacks.a: collections.Counter returns a Counter, no TrainerCallback"),
        ({"fn": "Counter"}, "callbacks.a.fn: write package.module.function"),
    ],
)
def test_a_wrong_callback_is_a_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configured(DictConfig({"a": options}))
