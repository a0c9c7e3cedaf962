"""The command line as a user types it, in a process of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo.extras.testing.commands import Command, command
from grpo.utils.manifest import is_sealed

QUICK = ["train.max_steps=2", "train.per_device_train_batch_size=8", "task.dataset.size=64", "task.eval.size=8"]


def train(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return command("grpo.train", *arguments, cwd=cwd)


def test_help_fits_one_screen_and_says_how_to_choose(tmp_path: Path) -> None:
    done = train(tmp_path, "--help")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert sum(max(1, -(-len(line) // 200)) for line in lines) <= 30, "rows of 200 columns"
    for word in ("+gpu=", "model=", "task=", "reward=", "-m ", "--cfg job", "rtx3080", "qwen2_5_1_5b", "gsm8k"):
        assert word in done.stdout
    assert not list(tmp_path.iterdir())


HELP = """
import sys
from hydra._internal.config_repository import CachingConfigRepository as Copy
from grpo.train import main
made, init = [], Copy.__init__
Copy.__init__ = lambda *arguments: made.append(init(*arguments))
sys.argv = ["grpo.train", "--help"]
try:
    main()
finally:
    sys.exit(len(made))
"""


def test_help_copies_the_configurations_once(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", HELP], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, "to compose; a copy per group takes seconds"


@pytest.mark.parametrize("module", ["train", "evaluate"])
def test_a_missing_data_file_is_reported_before_libraries_load(tmp_path: Path, module: str) -> None:
    code = (
        f"import sys; sys.argv[1:] = ['task=jsonl', 'task.dataset.path=no.jsonl']\nfrom grpo.{module} import main\n"
        "try: main()\nfinally: sys.exit(', '.join({'torch', 'transformers', 'trl', 'datasets'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    program, _, message = done.stderr.partition(": ")
    assert (program, message.count("\n")) == (f"grpo.{module}", 2), "with an empty list of libraries"
    assert message.startswith("task.dataset={path: no.jsonl}: there is no file ")
    assert message.strip().endswith("no.jsonl")


def test_the_whole_configuration_is_shown_without_running(tmp_path: Path) -> None:
    done = train(tmp_path, "+gpu=rtx3080", "--cfg", "job")
    assert done.returncode == 0
    assert "per_device_train_batch_size: 8" in done.stdout
    assert not list(tmp_path.iterdir())


WRONG = {
    "an unknown field": (["train.num_generation=4"], "did you mean num_generations"),
    "an unknown group": (["modle=tiny"], "did you mean model?"),
    "an unknown choice": (["model=qwen2_5_0_5"], "did you mean qwen2_5_0_5b"),
    "an unknown card": (["+gpu=rtx3081"], "did you mean rtx3080"),
    "a card without the plus": (["gpu=rtx3080"], "+gpu=rtx3080"),
    "a token": (["train.hub_token=secret"], "HF_TOKEN"),
    "another run directory": (["train.output_dir=here"], "hydra.run.dir="),
    "a reward without the plus": (["reward.mine.fn=mine.py:f"], "added with a plus: +reward.mine.fn="),
    "a wrong type": (["train.num_generations=four"], "train.num_generations: Value 'four'"),
    "quotes that the shell took": (
        ["task.prompt={q}"],
        "type \"task.prompt='{q}'\", as the shell takes its quotes away",
    ),
    "text with a comma": (
        ["task.prompt=Think, then answer."],
        "one text is \"task.prompt='Think, then answer.'\"",
    ),
    "text that is a list": (["task.system_prompt=[INST]"], "as text it is \"task.system_prompt='[INST]'\""),
    "no override at all": (["train.num_generations"], "write key=value"),
    "several values": (["train.num_generations=4,8"], "several values are a sweep, python -m grpo.train -m"),
    "a sweep to go on with": (["sweep.resume=true"], "a sweep is run with -m"),
    "parts of groups": (["train.num_generations=7"], "num_generations=2, 4, 8, 16; or train.per_device_train"),
    "a group of one": (["train.num_generations=1"], "at least 2"),
    "a model that is nowhere": (["model.model_name_or_path=no/model"], "neither a folder nor a model"),
    "a folder without a model": (["model.model_name_or_path=."], "no config.json"),
    "a missing task file": (
        ["task=gsm8k", "task.dataset.path=no.jsonl"],
        "there is no file",
    ),
    "a missing column": (["task.prompt='{problem}'"], "no column problem (task.prompt); it has: question, answer"),
    "a card that is not here": (["+gpu=h200"], "plan.enforce=false"),
    "a run directory that cannot be written": (["hydra.run.dir=/dev/null/run"], "hydra.run.dir="),
    "nothing to resume": (["train.resume_from_checkpoint=empty"], "no such directory"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_gets_one_line_and_status_2(tmp_path: Path, case: str) -> None:
    arguments, says = WRONG[case]
    done = train(tmp_path, *arguments)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("grpo.train: ")
    assert says in done.stderr


def test_a_run_from_the_command_line_fills_one_run_directory(tmp_path: Path) -> None:
    done = train(tmp_path, *QUICK, "train.seed=3")
    assert done.returncode == 0, done.stderr
    (run_dir,) = (tmp_path / "outputs").glob("*/*")
    assert {path.name for path in run_dir.iterdir()} >= {
        ".hydra",
        "metrics.jsonl",
        "completions",
        "evaluation.json",
        "checkpoint-2",
        "model",
        "summary.json",
        "train.log",
        "report.html",
    }
    page = (run_dir / "report.html").read_text()
    assert "python -m grpo.train" in page
    assert "train.seed=3</pre>" in page
    assert page.count("<figcaption") >= 6
    assert list(run_dir.glob("runs/*/events.out.tfevents.*")), "TensorBoard's"
    assert "train.seed=3" in (run_dir / ".hydra" / "overrides.yaml").read_text()
    assert str(run_dir.relative_to(tmp_path)) in done.stdout


@pytest.mark.slow
@pytest.mark.long
def test_a_failure_logs_its_traceback_and_prints_one_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def broken(completions, **columns):\n    return completions[0] + 1\n")
    done = train(tmp_path, *QUICK, "+reward.mine.fn=mine.py:broken", "+reward.mine.on_error=raise")
    assert done.returncode == 1
    *counts, first, last = done.stderr.splitlines()
    assert counts == ["64 problems to train on", "8 problems held out"]
    assert first.startswith("the first run of this task here: `python -m grpo.preflight` with the same arguments")
    assert last.startswith("grpo.train: failed: reward.mine: TypeError: ")
    (log,) = (tmp_path / "outputs").glob("*/*/train.log")
    assert str(log.relative_to(tmp_path)) in last
    assert 'mine.py", line 2' in log.read_text()
    summary = json.loads((log.parent / "summary.json").read_text())
    assert summary["task"] == "grpo.builtin.tasks.arithmetic.rows"  # for the next run


def last_step(run_dir: Path) -> int:
    lines = [line for line in (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True) if line[-1] == "\n"]
    return json.loads(lines[-1])["step"] if lines else 0


def wait_until(happened: Callable[[], bool], running: Command) -> None:
    deadline = time.monotonic() + 120
    while not happened():
        assert not running.ended(), "the run ended too early"
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.05)


@pytest.mark.long
@pytest.mark.slow
def test_an_interrupted_command_continues_where_it_was(tmp_path: Path) -> None:
    overrides = [*QUICK, "train.max_steps=2000", "train.save_steps=5"]
    running = Command("grpo.train", *overrides, cwd=tmp_path)
    wait_until(lambda: any(map(is_sealed, tmp_path.glob("outputs/*/*/checkpoint-5"))), running)
    os.kill(running.pid, signal.SIGKILL)  # no chance to save or to say goodbye
    running.wait()
    (run_dir,) = (tmp_path / "outputs").glob("*/*")
    steps = last_step(run_dir)
    running = Command("grpo.train", *overrides, "train.resume_from_checkpoint=auto", cwd=tmp_path)
    wait_until(lambda: last_step(run_dir) > steps + 1, running)
    os.kill(running.pid, signal.SIGTERM)
    done = running.wait(timeout=60)
    assert "train.resume_from_checkpoint=auto continues" in done.stderr
    assert done.returncode == 130
    assert list((tmp_path / "outputs").glob("*/*")) == [run_dir]
    numbers = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert numbers == list(range(1, len(numbers) + 1))
