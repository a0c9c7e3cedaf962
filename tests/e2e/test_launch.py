"""One command line on two processes: the same run by our launcher and by torchrun, stopped, killed and resumed."""

import json
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from grpo.config.schema import ROOT
from grpo.extras.testing.commands import command
from grpo.utils.manifest import is_sealed
from tests.e2e.launched import (
    AUTO,
    ENVIRONMENT,
    RUN,
    TWO,
    ended,
    has_ended,
    outcome,
    processes_of,
    prompts_by_step,
    start,
    wait_for,
)

pytestmark = [pytest.mark.slow, pytest.mark.long]

FAULTS = f"+reward.fault.fn={Path(__file__).with_name('faults.py')}:fault"


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two processes that was not interrupted."""
    folder = tmp_path_factory.mktemp("untouched")
    status, output, errors = ended(start(folder, TWO))
    assert status == 0, errors
    assert output.count("GRPO run completed") == 1
    assert errors.count("step 5/5") == 1
    return folder / "run"


def test_one_run_has_one_of_each_file_and_a_log_of_each_process(untouched: Path) -> None:
    logs = sorted(file.name for file in untouched.glob("train*.log"))
    assert logs == ["train.1.log", "train.log"]
    assert (untouched / ".hydra" / "overrides.yaml").is_file()
    evaluation = json.loads((untouched / "evaluation.json").read_text())
    assert evaluation["before"]["samples"] == evaluation["after"]["samples"] == 7
    lines = (untouched / "evaluation_after.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["problem"] for line in lines) == list(range(7))
    assert not list(untouched.glob("evaluation_*.1.jsonl"))
    assert json.loads((untouched / "summary.json").read_text())["completions_a_step"] == 16


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port")
FILES = ROOT / "launch" / "accelerate"
ACCELERATE = ("-m", "accelerate.commands.launch", "--config_file", str(FILES / "ddp.yaml"), "--num_processes", "2")


@pytest.mark.parametrize("launcher", [TORCHRUN, (*ACCELERATE, "--main_process_port")], ids=["torchrun", "accelerate"])
def test_other_launchers_give_the_same_run(launcher: tuple[str, ...], untouched: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    status, output, errors = ended(start(tmp_path, launcher=(*launcher, port)))
    assert status == 0, errors
    assert output.count("GRPO run completed") == 1
    (run_dir,) = tmp_path.glob("outputs/*/*")  # of both processes
    assert outcome(run_dir) == outcome(untouched)
    assert (run_dir / ".hydra" / "overrides.yaml").is_file()


def test_the_commands_for_skypilot_give_the_same_run(untouched: Path, tmp_path: Path) -> None:
    task = yaml.safe_load((ROOT / "launch" / "skypilot.yaml").read_text())
    sky = {"SKYPILOT_NODE_IPS": "127.0.0.1", "SKYPILOT_NUM_NODES": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "2"}
    environment = {**ENVIRONMENT, **sky, "SKYPILOT_TASK_ID": "run", "RUNS": str(tmp_path), "ARGUMENTS": " ".join(RUN)}
    done = subprocess.run(["bash", "-c", task["run"]], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert outcome(tmp_path / "run") == outcome(untouched)


@pytest.mark.parametrize(
    ("file", "kind"),
    [("ddp", "MULTI_GPU"), ("fsdp2", "FSDP"), ("zero2", "DEEPSPEED"), ("zero3", "DEEPSPEED")],
)
def test_accelerate_reads_the_files_for_it(file: str, kind: str) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    settings = load_config_from_file(str(FILES / f"{file}.yaml"))
    assert settings.distributed_type == kind
    assert settings.fsdp_config.get("fsdp_version") == (2 if file == "fsdp2" else None)
    assert settings.deepspeed_config.get("zero_stage") == (int(file[-1]) if file.startswith("zero") else None)


def test_a_stopped_run_resumes_and_ends_like_an_unstopped_one(untouched: Path, tmp_path: Path) -> None:
    running, run_dir = start(tmp_path, TWO), tmp_path / "run"
    wait_for(lambda: (run_dir / "metrics.jsonl").exists(), running)
    running.send_signal(signal.SIGTERM)
    status, _, errors = ended(running)
    assert status == 130, errors
    assert errors.splitlines()[-1].startswith("grpo.train: stopped: SIGTERM after step ")
    assert errors.count("stopped: SIGTERM") == 1
    assert "Traceback" not in errors
    assert "torch/distributed" not in errors
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "stopped"
    assert len([folder for folder in run_dir.glob("checkpoint-*") if is_sealed(folder)]) >= 1
    # what the second process had answered when it was killed in an evaluation of other weights is not taken again
    old = [json.loads(line) for line in (untouched / "evaluation_after.jsonl").read_text().splitlines()]
    (run_dir / "evaluation_after.1.jsonl").write_text(
        "".join(json.dumps({**row, "completion": "#"}) + "\n" for row in old)
    )
    status, _, errors = ended(start(tmp_path, TWO, AUTO))
    assert status == 0, errors
    assert outcome(run_dir) == outcome(untouched)


def test_one_process_continues_the_run_of_two(untouched: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(untouched, run_dir)
    shutil.rmtree(run_dir / "checkpoint-5")
    for arguments, says in (
        ([AUTO], "=1 on 2 instead of 1 on 1 (2 keeps the batch); train.resume_from_checkpoint=run/checkpoint-4 cont"),
        ([AUTO, "train.gradient_accumulation_steps=2", "train.loss_type=bnpo"], "its mean depends on the completions"),
        ([AUTO, "train.gradient_accumulation_steps=2", "train.entropy_coef=0.1"], "an entropy bonus depends on the"),
    ):
        status, _, errors = ended(start(tmp_path, *arguments))
        assert (status, errors.count("\n")) == (2, 1), errors
        assert says in errors
    status, _, errors = ended(start(tmp_path, "train.gradient_accumulation_steps=2", AUTO))
    assert status == 0, errors
    assert "processes: 2 before, 1 now" in errors
    assert json.loads((run_dir / "summary.json").read_text())["completions_a_step"] == 16
    assert steps_done(run_dir) == 5
    assert prompts_by_step(run_dir) == prompts_by_step(untouched)


def test_two_processes_continue_another_batch_of_one_if_named(tmp_path: Path) -> None:
    status, _, errors = ended(start(tmp_path, "train.max_steps=2"))
    assert status == 0, errors
    status, _, errors = ended(start(tmp_path, TWO, "train.resume_from_checkpoint=run/checkpoint-2"))
    assert status == 0, errors
    assert "=1 on 1 instead of 1 on 2 (no number keeps the batch)" in errors
    assert "processes: 1 before, 2 now" in errors
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["completions_a_step"] == 16


def steps_done(run_dir: Path) -> int:
    """Steps of which metrics have been written."""
    file = run_dir / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def test_a_killed_process_restarts_all_from_the_last_checkpoint(untouched: Path, tmp_path: Path) -> None:
    running, run_dir = start(tmp_path, TWO, "launch.max_restarts=1"), tmp_path / "run"
    wait_for(lambda: steps_done(run_dir) == 3, running)  # one more than in the newest checkpoint
    processes_of(run_dir)[1].kill()
    status, output, errors = ended(running)
    assert status == 0, errors
    said = errors.splitlines()
    assert "grpo.train: a process has died; restart 1 of all" in said
    assert any(line.startswith("resuming from") and line.endswith("checkpoint-2") for line in said)
    assert not [line for line in said if "failed" in line], "the launcher says it, if it is the end"
    assert output.count("GRPO run completed") == 1
    assert outcome(run_dir) == outcome(untouched)


def test_a_killed_process_without_restarts_ends_all_in_one_line(tmp_path: Path) -> None:
    running, run_dir = start(tmp_path, TWO), tmp_path / "run"
    wait_for(lambda: (run_dir / "metrics.jsonl").exists(), running)
    others = processes_of(run_dir)
    others[1].kill()
    status, _, errors = ended(running)
    assert status == 1
    assert "process 1 was killed by SIGKILL" in errors.splitlines()[-1]
    assert "Traceback" not in errors
    assert "process 1" in json.loads((run_dir / "summary.json").read_text())["reason"]
    assert all(has_ended(one) for one in others.values())


def test_no_process_outlives_the_one_that_has_started_it(tmp_path: Path) -> None:
    running, run_dir = start(tmp_path, TWO, "train.max_steps=1000", forks=False), tmp_path / "run"
    wait_for(lambda: (run_dir / "metrics.jsonl").exists(), running)
    started = list(processes_of(run_dir).values())
    running.kill()
    assert len(started) == 2
    deadline = time.monotonic() + 120
    while not all(has_ended(one) for one in started):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_fault_on_one_process_ends_all_with_its_reason_once(tmp_path: Path) -> None:
    fault = [FAULTS, "+reward.fault.on_error=raise", f"+reward.fault.kwargs.marker={tmp_path / 'marker'}"]
    status, _, errors = ended(start(tmp_path, TWO, *fault, "+reward.fault.kwargs.do=raise"))
    assert status == 1
    assert errors.count("the function is asleep") == 1
    assert errors.splitlines()[-1].startswith("grpo.train: failed: reward.fault: ValueError: the function is asleep")
    assert "asleep" in json.loads((tmp_path / "run" / "summary.json").read_text())["reason"]


def test_the_plan_counts_the_processes_that_will_be_launched(tmp_path: Path) -> None:
    line = ["grpo.plan", "plan.format=json", f"hydra.run.dir={tmp_path}"]
    steps = []
    for processes in ("1", "auto", "2"):
        done = command(*line, f"launch.processes={processes}", cwd=ROOT)
        assert done.returncode == 0, done.stderr
        steps.append(json.loads(done.stdout)["duration"]["steps"])
    assert steps == [160, 160, 80], "without a GPU auto is one process"


def test_processes_that_contradict_torchrun_are_one_line(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    contradiction = ("launch.nodes=2", "launch.processes=2", "launch.rendezvous=node0:29500")
    _, _, errors = ended(start(tmp_path, *contradiction, launcher=launcher))
    assert errors.count("grpo.train: ") == 1
    says = "launch.nodes=2 launch.processes=2: 2 processes have been started already, as by torchrun; leave it out"
    assert f"grpo.train: {says}" in errors


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["launch.processes=0"], "launch.processes=0: a positive number, or auto"),
        (["launch.processes=many"], "launch.processes=many: a positive number, or auto"),
        (["launch.processes=3", "train.num_generations=16"], "does not hold whole groups; nearest"),
        (["launch.nodes=0"], "launch.nodes=0: a positive number of machines"),
        (["launch.nodes=2"], "launch.nodes=2: needs launch.rendezvous=host:port, of the first machine"),
        (
            ["launch.nodes=2", "launch.rendezvous=node0"],
            "launch.rendezvous=node0: write host:port of the first machine",
        ),
        (["launch.nodes=2", "launch.rendezvous=node0:70000"], "launch.rendezvous=node0:70000: write host:port of"),
    ],
)
def test_what_cannot_be_launched_is_one_line(tmp_path: Path, arguments: list[str], says: str) -> None:
    status, _, errors = ended(start(tmp_path, *arguments))
    assert status == 2
    assert says in errors
    assert errors.count("\n") == 1
