"""The same command on two machines; the delay of 50 ms needs the kernel's netem."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo.config.schema import ROOT
from tests.e2e.launched import ENVIRONMENT, RUN, TWO, ended, has_ended, outcome, processes_of, start, wait_for
from tests.e2e.machines import ADDRESSES, CABLE, NODES, RENDEZVOUS, ip, on, three_machines

pytestmark = [pytest.mark.slow, pytest.mark.long]

BOTH = ("launch.nodes=2", f"launch.rendezvous={RENDEZVOUS}")
SRUN = f"""#!/usr/bin/env bash
[[ "$*" == *--nodes=2\\ --ntasks=2* || "$*" == *submitit* ]] || exit 9
while [[ "$1" == -* ]]; do [[ "$1" == --output || "$1" == --error ]] && shift; shift; done
number=0
for node in {" ".join(NODES[:2])}; do
  SLURM_NODEID=$number SLURM_PROCID=$number SLURM_LOCALID=0 ip netns exec $node "$@" & echo $! >>"$TASKS"
  number=1
done
status=0
for task in $(jobs -p); do wait "$task" || status=$?; done
exit "$status"
"""
SACCT = """#!/usr/bin/env bash
printf '%s\\n' 'JobID|State|NodeList' "7|$([ -e "$TASKS.done" ] && echo FAILED || echo RUNNING)|"
"""
SBATCH = """#!/usr/bin/env bash
grep -q -- --nodes=2 "$1" && grep -q -- --ntasks-per-node=1 "$1" || exit 9
{ bash "$1"; touch "$TASKS.done"; } >"$TASKS.log" 2>&1 &
echo "Submitted batch job 7"
"""
SCONTROL = f"""#!/usr/bin/env bash
if [ "$1" = requeue ]; then echo "$2" >>"$REQUEUED"; else printf '%s\\n' {" ".join(ADDRESSES[:2])}; fi
"""
SCANCEL = """#!/usr/bin/env bash
[ "$*" = "--signal=TERM 7.0" ] && kill -TERM $(cat "$TASKS")
"""


@pytest.fixture(scope="module", autouse=True)
def machines() -> Iterator[None]:
    with three_machines():
        yield


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of two processes on one machine."""
    folder = tmp_path_factory.mktemp("alone")
    status, _, errors = ended(start(folder, TWO))
    assert status == 0, errors
    return folder / "run"


def start_both(folder: Path, *arguments: str, named: bool = True) -> list[subprocess.Popen[str]]:
    return [start(folder, *BOTH, *arguments, machine=NODES[node], named=named) for node in (0, 1)]


def test_two_machines_50_ms_apart_train_as_one_does(alone: Path, tmp_path: Path) -> None:
    delay = ("tc", "qdisc", "add", "dev", CABLE[0], "root", "netem", "delay", "50ms")
    subprocess.run([*on(0), *delay], capture_output=True, check=False)  # without netem, next to each other
    said = [ended(process) for process in start_both(tmp_path, named=False)]
    subprocess.run([*on(0), "tc", "qdisc", "del", "dev", CABLE[0], "root"], capture_output=True, check=False)
    assert [status for status, _, _ in said] == [0, 0], said
    assert "".join(output for _, output, _ in said).count("GRPO run completed") == 1
    (run_dir,) = tmp_path.glob("outputs/*/*")  # of both
    assert sorted(file.name for file in run_dir.glob("train*.log")) == ["train.1.log", "train.log"]
    assert (run_dir / ".hydra" / "overrides.yaml").is_file()
    assert outcome(run_dir) == outcome(alone)


def test_both_machines_restart_from_a_checkpoint_after_a_kill(alone: Path, tmp_path: Path) -> None:
    running, run_dir = start_both(tmp_path, "launch.max_restarts=1"), tmp_path / "run"
    wait_for(lambda: (run_dir / "checkpoint-2" / "manifest.json").exists(), running[0])
    processes_of(run_dir)[1].kill()
    said = [ended(process) for process in running]
    assert [status for status, _, _ in said] == [0, 0], said
    assert "".join(errors for _, _, errors in said).count("resuming from") == 1
    assert outcome(run_dir) == outcome(alone)


def test_a_silent_machine_ends_both_and_leaves_no_process(tmp_path: Path) -> None:
    running, run_dir = start_both(tmp_path, "launch.timeout=30", "train.max_steps=1000"), tmp_path / "run"
    wait_for(lambda: (run_dir / "metrics.jsonl").exists(), running[0])
    others = processes_of(run_dir)
    begun = time.monotonic()
    try:
        assert ip("-n", NODES[1], "link", "set", CABLE[1], "down")
        said = [ended(process) for process in running]
    finally:
        ip("-n", NODES[1], "link", "set", CABLE[1], "up")
    assert [status for status, _, _ in said] == [1, 1], said
    assert time.monotonic() - begun < 30
    for _, _, errors in said:
        assert errors.splitlines()[-1].startswith("grpo.train: failed: "), errors
        assert "Traceback" not in errors
    assert all(has_ended(one) for one in others.values())


def test_a_machine_that_never_comes_is_one_line_in_time(tmp_path: Path) -> None:
    begun, limit = time.monotonic(), "launch.timeout=10"
    first = start(tmp_path, *BOTH, limit, machine=NODES[0])
    second = start(tmp_path, "launch.nodes=2", f"launch.rendezvous={ADDRESSES[0]}:29501", limit, machine=NODES[1])
    says = [
        f"grpo.train: failed: launch.nodes=2: not all machines came to {RENDEZVOUS} within launch.timeout=10 s; ",
        f"grpo.train: launch.rendezvous={ADDRESSES[0]}:29501: nobody answers there within 10 s",
    ]
    for process, line in zip((first, second), says, strict=True):
        status, _, errors = ended(process)
        assert (status, errors.count("\n")) == (1, 1), errors
        assert errors.startswith(line)
    assert time.monotonic() - begun < 40  # with the time to start


def test_an_address_that_is_taken_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        rendezvous = f"launch.rendezvous=127.0.0.1:{other.getsockname()[1]}"
        status, _, errors = ended(start(tmp_path, "launch.nodes=2", rendezvous))
    assert (status, errors.count("\n")) == (2, 1), errors
    assert "in use by another program or run; choose another port" in errors


def test_a_port_of_another_program_is_one_line(tmp_path: Path) -> None:
    line = [*on(0), "python3", "-m", "http.server", "29502"]
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as other:
        rendezvous = f"launch.rendezvous={ADDRESSES[0]}:29502"
        status, _, errors = ended(start(tmp_path, "launch.nodes=2", rendezvous, "launch.timeout=5", machine=NODES[1]))
        other.kill()
    assert (status, errors.count("\n")) == (1, 1), errors
    assert "the program that listens there is not this one" in errors


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a job of two nodes, submitted from a folder in which the project is."""
    programs = tmp_path / "bin"
    programs.mkdir()
    programs_of_slurm = {"srun": SRUN, "scontrol": SCONTROL, "scancel": SCANCEL, "sbatch": SBATCH, "sacct": SACCT}
    for name, text in programs_of_slurm.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (tmp_path / ".venv").symlink_to(ROOT / ".venv")
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "2"}
    job |= {"SLURM_JOB_NODELIST": ",".join(ADDRESSES[:2]), "SLURM_SUBMIT_DIR": str(tmp_path), "PROCESSES": "1"}
    files = {"TASKS": str(tmp_path / "tasks"), "REQUEUED": str(tmp_path / "requeued")}
    return {**ENVIRONMENT, **job, **files, "PATH": f"{programs}:{os.environ['PATH']}"}


def test_a_job_out_of_time_is_requeued_and_resumes_in_place(
    slurm: dict[str, str],
    tmp_path: Path,
    alone: Path,
) -> None:
    """With a stand-in for the programs of Slurm, which run the command once on each machine."""
    line = [str(ROOT / "launch" / "slurm.sbatch"), *RUN]
    said = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    run_dir = tmp_path / "outputs" / "slurm-7"
    job = subprocess.Popen(line, env=slurm, **said)  # type: ignore[call-overload]
    wait_for((run_dir / "metrics.jsonl").exists, job)
    job.send_signal(signal.SIGTERM)  # as --signal=B:TERM has it: to the script alone
    output, _ = job.communicate(timeout=120)
    assert job.returncode == 130, output
    assert (tmp_path / "requeued").read_text() == "7\n"
    (tmp_path / "tasks").unlink()
    done = subprocess.run(line, env=slurm, timeout=240, **said)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout
    assert "resuming from outputs/slurm-7/checkpoint-" in done.stdout
    assert outcome(run_dir) == outcome(alone)


def test_a_job_of_a_sweep_trains_on_two_machines_of_slurm(slurm: dict[str, str], tmp_path: Path, alone: Path) -> None:
    """submitit submits it to stand-ins for the programs of Slurm."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    line = [sys.executable, "-m", "grpo.train", "-m", "hydra/launcher=submitit_slurm", "launch.nodes=2", *RUN]
    line.append(f"hydra.sweep.dir={tmp_path}/sweep")
    for more in ([], ["sweep.resume=true"]):  # what has been trained is not trained again
        done = subprocess.run([*line, *more], env=slurm, cwd=tmp_path, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "sweep" / "0" / "train.log").read_text().count("GRPO run completed") == 1
        assert outcome(tmp_path / "sweep" / "0") == outcome(alone)
    assert [folder.name for folder in (tmp_path / "sweep").glob("[!.]*/")] == ["0"]
