"""The page of a script, with TRL's trainer and with ours."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import TrainerControl, TrainerState
from trl import GRPOConfig, GRPOTrainer

import grpo
from grpo.builtin.tasks.arithmetic import rows
from grpo.extras.page import callback
from grpo.reporting.listing import row_of
from grpo.rundir.run_dir import read_run
from grpo.trainer import ExactGRPOTrainer

POLICY = Path(grpo.__file__).parent / "builtin" / "tiny"


def correct(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    return [float(said.rstrip().endswith(f"#### {right}")) for said, right in zip(completions, answer, strict=True)]


def short(completions: list[str], **columns: Any) -> list[float]:
    return [1 / (1 + len(said)) for said in completions]


def trained(trainer_class: type, folder: Path) -> Path:
    problems = Dataset.from_list(rows(split="train", size=16, seed=0))
    args = GRPOConfig(
        output_dir=str(folder),
        max_steps=2,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=16,
        reward_weights=[1.0, 0.25],
        bf16=False,
        logging_steps=1,
        log_completions=True,
        num_completions_to_print=0,
        save_strategy="no",
        report_to="none",
    )
    trainer = trainer_class(
        model=str(POLICY),
        reward_funcs=[correct, short],
        args=args,
        train_dataset=problems.map(lambda problem: {"prompt": f"{problem['question']}\n"}),
    )
    trainer.add_callback(grpo.Page(grader="correct", task="arithmetic"))
    trainer.train()
    return folder


@pytest.mark.parametrize("trainer_class", [GRPOTrainer, ExactGRPOTrainer])
def test_a_script_has_a_page_and_the_directory_of_a_run(trainer_class: type, tmp_path: Path) -> None:
    folder = trained(trainer_class, tmp_path / "run")
    page, content = (folder / "report.html").read_text(), json.loads((folder / "report.json").read_text())
    assert "<h1>tiny on arithmetic</h1>" in page
    assert (content["status"], content["heading"]["steps"], content["steps"]) == ("completed", "2 steps", 2)
    assert content["settings"]["rewards"] == "correct × 1, short × 0.25"
    assert content["curves"][0]["title"] == "Accuracy"
    assert [step["step"] for step in data_of(page)["steps"]] == [1, 2]
    assert content["command"].startswith(shlex.quote(sys.orig_argv[0])), "the command line of the script"
    assert read_run(folder).status == "completed"


def data_of(page: str) -> Any:
    return json.loads(page.split('<script type="application/json" id="data">')[1].split("</script>")[0])


def test_a_page_that_fails_does_not_end_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(folder: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(callback, "write_report", fails)
    args, control = GRPOConfig(output_dir=str(tmp_path), bf16=False, report_to="none"), TrainerControl()
    state, page = TrainerState(global_step=1, max_steps=3, is_world_process_zero=True), grpo.Page()
    page.on_train_begin(args, state, control)
    page.on_log(args, state, control, {"loss": 1.0})
    assert not (tmp_path / ".hydra" / "config.yaml").exists(), "the end of a training is no step"
    page.on_log(args, state, control, {"reward": 0.5, "rewards/org/r/mean": 0.5})
    assert row_of(tmp_path)["status"] == "running"
    page.on_train_end(args, state, control)
    assert "no page could be written" in caplog.text
    run = read_run(tmp_path)
    assert (run.status, run.metrics[0]["reward"], run.grader) == ("stopped", 0.5, None)
    assert [*run.config.reward] == ["org/r"]


def test_the_command_of_a_script_has_no_secrets() -> None:
    token = "hf_" + "a" * 20
    words = ["python", "train.py", "--hub_token", "abc", f"--x={token}", token, "--seed", "1", "api_key=b", "--key"]
    shown = ["python", "train.py", "--hub_token", "…", "--x=…", "…", "--seed", "1", "api_key=…", "--key"]
    assert callback.without_secrets(words) == shown


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    args, control = GRPOConfig(output_dir=str(tmp_path / "run"), bf16=False, report_to="none"), TrainerControl()
    state, page = TrainerState(global_step=1, max_steps=1, is_world_process_zero=False), grpo.Page()
    page.on_train_begin(args, state, control)
    page.on_log(args, state, control, {"reward": 0.5})
    page.on_train_end(args, state, control)
    assert not (tmp_path / "run").exists()


def test_the_package_loads_no_library_for_the_page() -> None:
    line = "import sys, grpo; assert not {'torch', 'jinja2', 'omegaconf'} & {*sys.modules}; assert grpo.Page.on_log"
    subprocess.run([sys.executable, "-c", line], check=True)
    with pytest.raises(AttributeError, match="no attribute 'Pages'"):
        _ = grpo.Pages
