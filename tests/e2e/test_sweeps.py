"""Sweeps as they are run: jobs that fail in the night, continuing with them, and Ctrl-C."""

import re
import signal
import subprocess
import sys
import time

import pytest

from grpo.extras.testing.commands import Forked, outcomes, sweep
from grpo.utils.spoken import shown

pytestmark = [pytest.mark.slow, pytest.mark.long]

SMALL = ["train.max_steps=1", "task.eval.size=4", "task.dataset.size=128", "train.per_device_train_batch_size=16"]
LONG = "1 " * 800
"""Words before the question, so that a single sequence takes memory in the update."""


@pytest.fixture(scope="module")
def night(tmp_path_factory):
    """A sweep in which one job runs out of memory, one is killed and a reward raises in one; and its arguments."""
    folder = tmp_path_factory.mktemp("night")
    arguments = [
        *(text for text in SMALL if "batch_size" not in text),
        "+reward.fault.kwargs.do=nothing,memory,kill,raise",
        "+reward.fault.fn=tests/e2e/faults.py:fault",
        "+reward.fault.on_error=raise",
        f"+reward.fault.kwargs.marker={folder}/happened",
        f"task.prompt='{LONG}{{question}}'",
        "task.max_prompt_length=2000",
        "task.eval.size=0",
        "train.per_device_train_batch_size=2",
        "train.num_generations=2",
        "model.attn_implementation=eager",
        "update.share_prompts=false",
    ]
    return folder / "sweep", arguments, sweep(folder / "sweep", *arguments)


def test_a_job_that_fails_is_reported_and_the_others_run(night):
    folder, _, done = night
    assert done.returncode == 1
    found = outcomes(folder)
    assert [found[name]["status"] for name in "0123"] == ["completed", "failed", "failed", "failed"]
    assert found["0"]["reason"] is None
    assert re.match(
        r"a single sequence of 8\d\d prompt and 24 completion tokens does not fit into memory", found["1"]["reason"]
    )
    assert found["2"]["reason"] == "killed by SIGKILL; the system does that when host memory is used up"
    assert found["3"]["reason"].startswith("reward.fault: ValueError: the function is asleep")


def test_the_last_lines_say_which_jobs_failed_and_why(night):
    folder, _, done = night
    last = done.stderr.splitlines()[-4:]
    assert (
        last[0]
        == "grpo.train: 3 of 4 jobs failed; once that is fixed, the same command with sweep.resume=true runs them"
    )
    for line, (name, do) in zip(last[1:], {"1": "memory", "2": "kill", "3": "raise"}.items(), strict=True):
        assert line == f"  #{name} +reward.fault.kwargs.do={do}: {outcomes_before(done)[name]}"
    assert f"page: {shown(folder / 'report.html')}" in done.stdout
    assert "Traceback" not in done.stderr


def outcomes_before(done: subprocess.CompletedProcess) -> dict[str, str]:
    """The reasons, from the lines of the jobs themselves."""
    reasons = {}
    for name, text in re.findall(
        r"^#(\d) (?:grpo\.train: failed: )?(.*?)(?:; the traceback is in .*)?$", done.stderr, re.M
    ):
        reasons[name] = text
    return reasons


def test_every_job_has_a_page_and_the_sweep_has_one(night):
    folder, _, _ = night
    assert all((folder / name / "report.html").is_file() for name in "0123")
    page = (folder / "report.html").read_text()
    assert "killed by SIGKILL" in page
    assert "3 not completed" in page


def test_a_sweep_continues_with_what_failed_and_leaves_the_rest(night):
    folder, arguments, _ = night
    before = (folder / "0" / "metrics.jsonl").stat().st_mtime_ns
    again = sweep(folder, *arguments)
    assert again.returncode == 2
    assert "there is a sweep in it; sweep.resume=true runs what is missing or failed" in again.stderr
    done = sweep(folder, *arguments, "sweep.resume=true")
    assert done.returncode == 0, done.stderr
    assert {summary["status"] for summary in outcomes(folder).values()} == {"completed"}
    assert (folder / "0" / "metrics.jsonl").stat().st_mtime_ns == before
    assert "#0 completed before" in done.stderr


def test_jobs_may_have_two_processes_and_a_failure_is_reported(tmp_path):
    small = ["task.dataset.size=32", "task.eval.size=4", "train.max_steps=1", "train.num_generations=4"]
    done = sweep(tmp_path, *small, "train.per_device_train_batch_size=4,3", "launch.processes=2")
    found = outcomes(tmp_path)
    assert done.returncode == 1, done.stderr
    assert [found[name]["status"] for name in "01"] == ["completed", "failed"]
    assert found["0"]["completions_a_step"] == 8
    assert (tmp_path / "0" / "train.1.log").is_file()
    assert "a batch of 6 completions does not hold whole groups" in found["1"]["reason"]
    assert "1 of 2 jobs failed" in done.stderr


def test_ctrl_c_ends_the_sweep_and_its_job_with_a_checkpoint(tmp_path):
    arguments = ["train.seed=0,1", "task.eval.size=0", "train.save_steps=1000"]
    line = [sys.executable, "-m", "grpo.train", "-m", f"hydra.sweep.dir={tmp_path}", *arguments]
    process = Forked(line, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    metrics = tmp_path / "0" / "metrics.jsonl"
    while not metrics.exists() and process.poll() is None:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=120)[1]
    assert process.returncode == 130
    assert outcomes(tmp_path)["0"]["status"] == "stopped"
    assert list((tmp_path / "0").glob("checkpoint-*"))
    assert not (tmp_path / "1").exists()
    assert "the same command with sweep.resume=true continues with the jobs that are not completed" in errors
    assert "Traceback" not in errors
