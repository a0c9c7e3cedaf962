"""Preparing a sweep, its jobs and its table, without training."""

import errno
import fcntl
import io
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from hydra import compose
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf, open_dict

from grpo.cli import quoted, register_resolvers
from grpo.rundir.sweep_dir import read_sweep
from grpo.sweeps.callback import begin, note_if_killed
from grpo.sweeps.job import (
    begun_before,
    command,
    free_folder,
    lock_of,
    locked,
    overrides_of,
    own_devices,
    reason_of,
    train_in_process,
)
from grpo.utils.errors import ConfigError
from grpo.utils.hardware import visible_gpus


@pytest.fixture
def master(composed, tmp_path):
    """A function from overrides to what Hydra composes for a sweep, without the values that are swept."""

    def make(*typed: str, options: tuple[str, ...] = (), sweep_dir: Path | str = tmp_path / "day" / "time"):
        fixed = [text for text in typed if "," not in text]
        config = compose("config", [*fixed, f"hydra.sweep.dir='{sweep_dir}'"], return_hydra_config=True)
        with open_dict(config):
            config.hydra.overrides.task, config.hydra.overrides.hydra = list(typed), list(options)
        return config

    return make


def steps_of(folder: Path, generations: int) -> float:
    """Steps that a job of a prepared sweep does."""
    job = compose("config", [f"train.num_generations={generations}"])
    hydra = OmegaConf.create({"overrides": {"task": [f"train.num_generations={generations}", "sweep.resume=true"]}})
    overrides = overrides_of(json.loads((folder / "sweep.json").read_text()), job, hydra)
    assert "sweep.resume=true" not in overrides
    job = compose("config", overrides)
    return job.train.num_train_epochs * job.task.dataset.size / (job.train.per_device_train_batch_size / generations)


@pytest.mark.parametrize("generations", [2, 4, 8, 16, 32])
def test_a_sweep_over_group_sizes_keeps_steps_and_completions(generations, master):
    assert steps_of(begin(master("train.num_generations=2,4,8,16,32")), generations) == 160


def test_what_is_kept_equal_is_written_down(master, tmp_path, capsys):
    begin(master("train.num_generations=2,4"))
    written = json.loads((tmp_path / "day" / "time" / "sweep.json").read_text())
    assert written["overrides"] == ["train.num_generations=2,4"]
    told = "the same number of completions per step in every job as with train.num_generations=8, and about the same"
    assert written["comparison"].startswith(told)
    assert written["comparison"] in capsys.readouterr().err


@pytest.mark.parametrize(
    "typed",
    [
        ("train.num_generations=2,4", "train.num_train_epochs=2"),
        ("train.num_generations=2,4", "train.max_steps=5"),
        ("train.num_generations=2,4", "train.per_device_train_batch_size=64,128"),
        ("train.num_generations=2,4", "task.dataset.size=256,512"),
        ("train.num_generations=2,4", "task=arithmetic,sums"),
        ("train.learning_rate=1e-3,1e-4",),
        ("train.num_generations=4", "train.learning_rate=1e-3,1e-4"),
    ],
)
def test_what_the_user_fixes_stays(typed, master, tmp_path):
    written = json.loads((begin(master(*typed)) / "sweep.json").read_text())
    assert (written["comparison"], written["same_steps_as"]) == (None, None)


def test_group_sizes_that_the_sweeper_varies_count_as_swept(master):
    config = master("train.learning_rate=1e-3")
    with open_dict(config):
        config.hydra.sweeper.params = {"train.num_generations": "choice(2,4)"}
    assert steps_of(begin(config), 4) == 160


def test_a_directory_with_a_sweep_is_not_written_over(master):
    job_in(begin(master("train.seed=0,1")), "0", "train.seed=0")
    with pytest.raises(ConfigError, match=r"there is a sweep in it; sweep\.resume=true runs what is missing or failed"):
        begin(master("train.seed=0,1"))


def test_the_newest_sweep_of_the_same_command_goes_on(master, tmp_path):
    for name in ("01", "02", "03"):
        typed = "train.seed=0,1" if name < "03" else "train.seed=5,6"
        begin(master(typed, sweep_dir=tmp_path / "day" / name))
    new = f"{tmp_path}/day/${{now:%H-%M-%S}}"
    resumed = begin(master("train.seed=0,1", "++sweep.resume=true", "launch.timeout=9", sweep_dir=new))
    assert resumed == tmp_path / "day" / "02"
    other = master("train.seed=0,1", "sweep.resume=true", sweep_dir=new)
    other.train.loss_type = "bnpo"  # as another --config-name has it
    with pytest.raises(ConfigError, match=r"no sweep of this configuration in .*; name it with hydra\.sweep\.dir="):
        begin(other)


def test_a_directory_that_is_named_and_has_no_sweep_cannot_go_on(master, tmp_path):
    named = ("hydra.sweep.dir=x",)
    with pytest.raises(ConfigError, match=r"there is no sweep in hydra\.sweep\.dir="):
        begin(master("train.seed=0,1", "sweep.resume=true", options=named, sweep_dir=tmp_path / "mistyped"))


@pytest.mark.parametrize("value", ["latest", "outputs/mine,latest"])
def test_the_latest_run_is_not_for_jobs_of_a_sweep(master, value):
    with pytest.raises(ConfigError, match="=latest: to each job that is the job before it; name the run directory"):
        begin(master("train.seed=0,1", f"train.resume_from_checkpoint={value}"))
    assert begin(master("train.seed=0,1", "train.resume_from_checkpoint=outputs/latest_mine")).exists()


def test_a_command_that_came_to_no_job_can_be_corrected(master):
    begin(master("train.seed=0,1"))
    assert begin(master("train.seed=0,1,2")).exists()


def test_a_job_killed_with_its_sweep_is_not_counted_as_running(composed, tmp_path):
    killed, running = job_in(tmp_path, "0", "train.seed=0"), job_in(tmp_path, "1", "train.seed=1")
    with locked(running / ".lock"):
        for folder in (killed, running):
            note_if_killed(folder)
    assert json.loads((killed / "summary.json").read_text())["status"] == "stopped"
    assert not (running / "summary.json").exists()


def test_optuna_needs_problems_that_are_held_out(master):
    config = master("train.seed=0", "task.eval.size=0")
    with open_dict(config):
        config.hydra.sweeper = {"_target_": "optuna_sweeper.OptunaSweeper"}
    with pytest.raises(ConfigError, match="the highest accuracy; hold problems out"):
        begin(config)


def test_a_sweep_of_which_one_job_has_begun_has_what_is_swept(composed, tmp_path):
    job_in(tmp_path, "0", "train.seed=0", "train.max_steps=3")
    (tmp_path / "sweep.json").write_text(json.dumps({"comparison": None, "swept": ["train.seed"]}))
    assert read_sweep(tmp_path).varied == ["train.seed"]


def test_a_job_of_a_sweep_gets_several_machines_from_slurm_alone(master):
    with pytest.raises(ConfigError, match=r"launch\.nodes=2: .* with hydra/launcher=submitit_slurm only"):
        begin(master("train.seed=0,1", "launch.nodes=2"))
    with pytest.raises(ConfigError, match=r"launch\.nodes: one number for all jobs of a sweep"):
        begin(master("launch.nodes=1,2"))
    config = master("train.seed=0,1", "launch.nodes=2")
    with open_dict(config):
        config.hydra.launcher = {"_target_": "submitit.SlurmLauncher", "nodes": 3}
    with pytest.raises(ConfigError, match=r"hydra\.launcher\.nodes=3: launch\.nodes=2 is the number of machines"):
        begin(config)


def test_a_sweep_is_not_for_torchrun(master, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="not under torchrun"):
        begin(master("train.seed=0,1"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("joblib", {"n_jobs": 3}),
        ("submitit_local", {"timeout_min": 1440, "gpus_per_node": 3}),
        ("submitit_slurm", {"timeout_min": 1440, "gpus_per_node": 1}),
        ("ray", {"ray": {"init": {"address": None}, "remote": {"num_gpus": 1, "max_calls": 1}}}),
    ],
)
def test_launchers_have_settings_that_suit_training(name, settings, composed, monkeypatch):
    pytest.importorskip(
        {"joblib": "joblib", "ray": "hydra_plugins.hydra_ray_launcher"}.get(
            name, "hydra_plugins.hydra_submitit_launcher"
        )
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,5")
    register_resolvers()
    config = compose("config", [f"hydra/launcher={name}"], return_hydra_config=True).hydra.launcher
    for key, value in settings.items():
        assert config[key] == value, key
    assert "_target_" in config, "from the plugin"


@pytest.mark.slow
def test_jobs_run_one_at_a_time_on_cpu_and_use_a_clusters_gpu(composed, monkeypatch):
    pytest.importorskip("hydra_plugins.hydra_ray_launcher")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    register_resolvers()
    assert compose("config", ["hydra/launcher=joblib"], return_hydra_config=True).hydra.launcher.n_jobs == 1
    gpus = {}
    for address in ("null", "auto"):
        typed = ["hydra/launcher=ray", f"hydra.launcher.ray.init.address={address}"]
        gpus[address] = compose("config", typed, return_hydra_config=True).hydra.launcher.ray.remote.num_gpus
    assert gpus == {"null": 0, "auto": 1}


@pytest.mark.slow
def test_what_was_typed_for_a_launcher_stays(composed):
    pytest.importorskip("joblib")
    typed = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=-1"]
    assert compose("config", typed, return_hydra_config=True).hydra.launcher.n_jobs == -1


@pytest.mark.slow
def test_optuna_maximizes_accuracy_and_survives_failures(composed):
    pytest.importorskip("optuna")
    sweeper = compose("config", ["hydra/sweeper=optuna"], return_hydra_config=True).hydra.sweeper
    assert (str(sweeper.direction), sweeper.max_failure_rate) == ("maximize", 1.0)


def job_in(sweep_dir: Path, name: str, *overrides: str, **summary: object) -> Path:
    """Make the directory of a job."""
    folder = sweep_dir / name
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "overrides.yaml").write_text(json.dumps(overrides))
    (folder / ".hydra" / "config.yaml").write_text(OmegaConf.to_yaml(compose("config", list(overrides))))
    if summary:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_a_job_goes_on_in_the_directory_that_it_began(composed, tmp_path):
    job_in(tmp_path, "0", "train.seed=0")
    begun = job_in(tmp_path, "1", "train.seed=1", "train.resume_from_checkpoint=true")
    hydra = OmegaConf.create({"runtime": {"output_dir": str(tmp_path / "0")}, "sweep": {"dir": str(tmp_path)}})
    assert begun_before(composed("train.seed=1"), ["train.seed=1"], hydra) == begun
    assert begun_before(composed("++train.seed=1"), ["++train.seed=1"], hydra) == begun
    assert begun_before(composed("train.seed=7"), ["train.seed=7"], hydra) is None
    mended = composed("train.seed=1", "train.beta=0.5")  # as a file of the configuration has it now
    assert begun_before(mended, ["train.seed=1"], hydra) == begun
    job_in(tmp_path, "2", "train.seed=2", status="completed")
    assert begun_before(composed("train.seed=2", "train.beta=0.5"), ["train.seed=2"], hydra) is None


def test_a_new_job_does_not_write_into_the_directory_of_another(composed, tmp_path):
    job_in(tmp_path, "0", "train.seed=0")
    assert free_folder(tmp_path / "1") == tmp_path / "1"
    assert free_folder(tmp_path / "0") == tmp_path / "0_2"


def test_the_command_of_a_job_trains_it_alone():
    hydra = OmegaConf.create(
        {
            "overrides": {"hydra": ["hydra.mode=MULTIRUN", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]},
            "job": {"num": 3, "id": "train_3", "config_name": "mine"},
            "sweep": {"dir": "/a sweep"},
            "runtime": {"config_sources": [{"provider": "command-line", "path": "/my conf"}]},
        }
    )
    hydra.overrides.hydra += [
        "hydra.sweep.dir=x",
        "hydra/sweeper=optuna",
        "hydra.verbose=true",
        "hydra.output_subdir=null",
    ]
    line = command(["train.seed=1"], Path("/a sweep/it's"), hydra)
    assert line[2:] == [
        "grpo.train",
        "--config-dir=/my conf",
        "--config-name=mine",
        "train.seed=1",
        "hydra.verbose=true",
        "hydra.mode=RUN",
        "hydra.run.dir='/a sweep/it\\'s'",
        "hydra.sweep.dir='/a sweep'",
        "hydra.job.num=3",
        "hydra.job.id='train_3'",
        "sweep.resume=false",
    ]


@given(st.text(st.characters(blacklist_categories=("Cs", "Cc")), min_size=1))
def test_hydra_reads_a_quoted_path_as_it_is(text):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    assert OverridesParser.create().parse_override(f"hydra.run.dir={quoted(text)}").value() == text


@pytest.mark.parametrize(
    ("status", "last", "reason"),
    [
        (2, "grpo.train: does not fit: 9 GB", "does not fit: 9 GB"),
        (1, "", "ended with exit status 1"),
        (-signal.SIGKILL, "", "killed by SIGKILL; the system does that when host memory is used up"),
        (-signal.SIGSEGV, "", "killed by SIGSEGV"),
    ],
)
def test_a_job_that_failed_has_a_reason(status, last, reason):
    assert reason_of(status, last) == reason


def write_cards(sweep_dir: Path, *cards: str) -> Path:
    (sweep_dir / "sweep.json").write_text(json.dumps({"overrides": [], "comparison": None, "cards": cards}))
    return sweep_dir


def test_jobs_that_run_at_once_have_different_gpus(tmp_path):
    write_cards(tmp_path, "2", "5")
    with own_devices(tmp_path, "JoblibLauncher") as first, own_devices(tmp_path, "JoblibLauncher") as second:
        assert [first["CUDA_VISIBLE_DEVICES"], second["CUDA_VISIBLE_DEVICES"]] == ["2", "5"]
        with pytest.raises(BlockingIOError), locked(tmp_path / ".2.lock", fcntl.LOCK_NB):
            pass
    with own_devices(tmp_path, "BasicLauncher") as again:
        assert again["CUDA_VISIBLE_DEVICES"] == "2"


@pytest.mark.parametrize(("processes", "gpus"), [(2, "2,5"), (4, "2,5,7"), ("auto", "2,5,7")])
def test_a_job_of_several_processes_has_a_gpu_for_each(processes, gpus, tmp_path):
    write_cards(tmp_path, "2", "5", "7")
    with own_devices(tmp_path, "JoblibLauncher", processes) as environment:
        assert environment["CUDA_VISIBLE_DEVICES"] == gpus


def test_a_job_that_finds_too_few_gpus_keeps_none_and_waits(tmp_path):
    write_cards(tmp_path, "2", "5", "7")
    devices = []

    def take_two():
        with own_devices(tmp_path, "JoblibLauncher", 2) as environment:
            devices.append(environment["CUDA_VISIBLE_DEVICES"])

    with own_devices(tmp_path, "JoblibLauncher", 2):
        waiting = threading.Thread(target=take_two)
        waiting.start()
        time.sleep(0.3)
        with own_devices(tmp_path, "JoblibLauncher") as third:
            assert third["CUDA_VISIBLE_DEVICES"] == "7"
        assert not devices
    waiting.join(10)
    assert devices == ["2,5"]


@pytest.mark.parametrize("launcher_class", ["SlurmLauncher", "RayLauncher"])
def test_a_device_that_a_scheduler_has_given_is_left_alone(launcher_class, tmp_path):
    write_cards(tmp_path, "0")
    with own_devices(tmp_path, launcher_class) as one, own_devices(tmp_path, launcher_class) as other:
        assert one == other == {}


def test_jobs_that_were_all_started_at_once_take_turns_on_a_cpu(tmp_path):
    write_cards(tmp_path)
    with own_devices(tmp_path, "LocalLauncher") as environment:
        assert environment == {}
        with pytest.raises(BlockingIOError), locked(tmp_path / ".cpu.lock", fcntl.LOCK_NB):
            pass
        with own_devices(tmp_path, "JoblibLauncher"):  # whose jobs share the cores
            pass


@pytest.mark.parametrize(("visible", "cards"), [("0,3", ["0", "3"]), ("", []), ("-1", []), ("GPU-1f2e", ["GPU-1f2e"])])
def test_the_cards_are_those_that_the_user_lets_see(visible, cards, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpus() == cards


def test_a_job_ends_with_its_process_whatever_is_left_running(tmp_path):
    leaves = "import os, subprocess; print(subprocess.Popen(['sleep', '60']).pid, flush=True); os.kill(os.getpid(), 9)"
    start = time.monotonic()
    assert train_in_process(["python3", "-c", leaves], tmp_path, str(tmp_path), {})[0] == -signal.SIGKILL
    assert time.monotonic() - start < 30
    left = int((tmp_path / "train.log").read_text())
    while psutil.pid_exists(left) and psutil.Process(left).status() != psutil.STATUS_ZOMBIE:  # it takes a moment to die
        assert time.monotonic() - start < 30
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_sweep_stops_its_job_and_waits_for_it(number, tmp_path, capfd):
    save = "lambda *signal: (time.sleep(0.3), print('saved', file=sys.stderr), exit(130))"
    line = ["python3", "-c", f"import signal, sys, time; signal.signal({number:d}, {save}); time.sleep(30)"]
    threading.Timer(1.0, os.kill, (os.getpid(), number)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        train_in_process(line, tmp_path, str(tmp_path), {})
    assert time.monotonic() - start < 20
    assert "saved" in capfd.readouterr().err


def test_a_job_ends_though_nobody_reads_what_it_says(tmp_path, monkeypatch):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(sys, "stderr", Closed())
    says = "import sys; sys.stderr.write(2000 * f'{100 * chr(120)}\\n' + 'grpo.train: last')"
    assert train_in_process(["python3", "-c", says], tmp_path, str(tmp_path), {}) == (0, "last")


def test_the_table_of_a_sweep_has_what_varied_and_how_it_ended(composed, tmp_path):
    for number, seed in enumerate((3, 4, 5)):
        job_in(tmp_path, str(number), "train.max_steps=5", f"train.seed={seed}")
    (tmp_path / "0" / "summary.json").write_text(json.dumps({"status": "completed", "reason": None}))
    (tmp_path / "1" / "summary.json").write_text(json.dumps({"status": "failed", "reason": "out of luck"}))
    sweep = read_sweep(tmp_path)
    assert sweep.varied == ["train.seed"]
    assert [sweep.value(run, "train.seed") for run in sweep.runs] == ["3", "4", "5"]
    assert [run.status for run in sweep.runs] == ["completed", "failed", "running"]
    assert [(sweep.name(run), run.reason) for run in sweep.failed] == [
        ("1", "out of luck"),
        ("2", "still running, or killed without a summary"),
    ]


def test_jobs_come_in_the_order_of_their_numbers(composed, tmp_path):
    for name in ("10", "2", "0_2", "0"):
        job_in(tmp_path, name, f"train.seed={len(name)}")
    sweep = read_sweep(tmp_path)
    assert [sweep.name(run) for run in sweep.runs] == ["0", "0_2", "2", "10"]


def test_an_empty_sweep_says_so(tmp_path):
    with pytest.raises(ConfigError, match="no job of this sweep has begun"):
        read_sweep(tmp_path)


def test_a_command_to_paste_is_quoted(composed, tmp_path):
    from grpo.rundir.run_dir import read_run

    run = read_run(job_in(tmp_path, "0", "task.prompt='a {question}'", "train.seed=1"))
    assert run.command == """python -m grpo.train 'task.prompt='"'"'a {question}'"'"'' train.seed=1"""


def test_a_slice_of_a_gpu_has_a_lock_in_the_sweeps_directory(tmp_path):
    lock = lock_of("MIG-GPU-8932f937-d72c-4106-c12f-20bd9faed9f6/1/0", tmp_path)
    assert lock.parent == tmp_path
    with locked(lock):
        assert lock.is_file()
