"""The directory of a run: by what was composed, wherever it was written."""

import fcntl
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra import compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict

from grpo.cli import register_resolvers
from grpo.evaluate import command_line
from grpo.rundir.directory import check_directory, check_no_run, choose
from grpo.rundir.lock import LOCK
from grpo.utils.distributed import BY_US
from grpo.utils.errors import ConfigError
from grpo.utils.manifest import seal

Chosen = Callable[..., tuple[str, str | None]]
Write = Callable[..., str]
NEW = "${new_run_directory:}"


@pytest.fixture
def chosen(composed: Callable[..., DictConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Chosen:
    """A function from overrides to the directory and the checkpoint that a run with them takes."""
    monkeypatch.chdir(tmp_path)
    register_resolvers()

    def choose_for(*overrides: str, place: str = NEW) -> tuple[str, str | None]:
        config = composed(*overrides)
        with open_dict(config):
            config.hydra = {"run": {"dir": place}}
            return choose(config)

    return choose_for


@pytest.fixture
def write_run(composed: Callable[..., DictConfig]) -> Write:
    """A function that makes the directory of a run."""

    def write(run_dir: Path, *overrides: str, status: str | None = "running", step: int | None = 2) -> str:
        (run_dir / ".hydra").mkdir(parents=True)
        OmegaConf.save(composed(*overrides), run_dir / ".hydra" / "config.yaml")
        if status:
            (run_dir / "summary.json").write_text(json.dumps({"status": status}))
        if step:
            (run_dir / f"checkpoint-{step}").mkdir()
            seal(run_dir / f"checkpoint-{step}")
        return str(run_dir)

    return write


AUTO = "train.resume_from_checkpoint=auto"
DAY = Path("outputs/2026-01-01")


def test_a_run_of_an_earlier_version_is_still_found(chosen: Chosen, write_run: Write) -> None:
    folder = write_run(DAY / "12-00-00", "train.seed=3")
    config = DAY / "12-00-00" / ".hydra" / "config.yaml"
    text = config.read_text()
    assert "grpo.generation.vllm.engine.PolicyEngine" in text
    config.write_text(text.replace("grpo.generation.vllm.engine.", "grpo.generation.vllm_engine."))
    assert chosen(AUTO, "train.seed=3")[0] == folder


@pytest.mark.parametrize(
    "line",
    [
        ("train.seed=1", AUTO),
        ("++train.seed=1", "train.resume_from_checkpoint=True"),
        ("train={seed:1}", "train={resume_from_checkpoint:auto}"),
        ("train.seed=2", "train.seed=1", AUTO, "launch.timeout=5", "sweep.resume=true"),
    ],
)
def test_auto_continues_what_was_composed_however_typed(
    chosen: Chosen, write_run: Write, line: tuple[str, ...]
) -> None:
    write_run(DAY / "01-00-00_2", "train.seed=1", status="stopped")
    newest = write_run(DAY / "01-00-00_10", "train.seed=1", status=None)
    write_run(DAY / "02-00-00", "train.seed=1", status="completed")
    write_run(DAY / "03-00-00", "train.seed=2")
    write_run(DAY / "04-00-00", "train.seed=1", "+reward=format")
    write_run(DAY / "05-00-00", "train.seed=1", step=None)
    assert chosen(*line) == (newest, "auto")
    assert chosen(*line[:-1], "train.seed=1", "train.resume_from_checkpoint=null")[0] != newest


def test_auto_skips_runs_that_run_and_says_which_are_torn(
    chosen: Chosen, write_run: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    torn = Path(write_run(DAY / "01-00-00"))
    (torn / "summary.json").write_text("")  # as a crash of the machine leaves it
    unreadable = Path(write_run(DAY / "02-00-00"))
    (unreadable / ".hydra" / "config.yaml").write_text("")
    running = Path(write_run(DAY / "03-00-00"))
    with (running / LOCK).open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        assert chosen(AUTO) == (str(torn), "auto")
    assert "02-00-00/.hydra/config.yaml is torn" in capsys.readouterr().err


def test_auto_looks_where_directories_are_made(
    chosen: Chosen, write_run: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCRATCH", "my [disk]")
    place = "${oc.env:SCRATCH}/${now:%Y}_run/${now:%H}"
    killed = write_run(Path("my [disk]/2026_run/01").absolute())
    assert Path(chosen(AUTO, place=place)[0]).absolute() == Path(killed)
    assert chosen(AUTO)[0].startswith("outputs/")


def test_a_run_of_an_earlier_version_is_the_same(chosen: Chosen, write_run: Write) -> None:
    run = Path(write_run(DAY / "01-00-00"))
    config = OmegaConf.load(run / ".hydra" / "config.yaml")
    assert isinstance(config, DictConfig)
    del config.train.vllm_mode, config.plan
    config.train.of_an_earlier_trl = 1
    OmegaConf.save(config, run / ".hydra" / "config.yaml")
    assert chosen(AUTO)[0] == str(run)


@pytest.mark.parametrize("option", ["hydra.run.dir=a/b", "++hydra.run.dir='a/b'", "hydra={run:{dir:a/b}}"])
def test_a_run_in_a_named_directory_is_not_overwritten(chosen: Chosen, write_run: Write, option: str) -> None:
    place = compose("config", [option], return_hydra_config=True).hydra.run.dir
    assert chosen(place=place) == ("a/b", None)
    write_run(Path("a/b"), status="completed")
    with pytest.raises(ConfigError, match=r"hydra.run.dir=a/b: there is a run in it \(completed\); .*=auto$"):
        chosen(place=place)
    assert chosen(AUTO, place=place) == ("a/b", "auto")


@pytest.mark.parametrize(
    ("status", "step", "resume_from", "refused"),
    [
        ("completed", 2, None, "completed"),
        ("failed", None, None, "failed"),
        ("running", None, None, "killed"),
        ("", None, None, "torn"),
        ("completed", 2, True, None),
        ("completed", 2, "{run}/checkpoint-2", None),
        ("completed", None, "auto", "completed"),
        ("completed", None, "{run}/../other", "completed"),
        ("running", 2, "{run}/../other/checkpoint-2", "killed"),
        ("running", None, "{run}/../other/checkpoint-2", None),
        ("running", None, "auto", None),
        (None, None, None, None),
    ],
)
def test_only_what_continues_a_run_enters_its_directory(
    write_run: Write, tmp_path: Path, status: str | None, step: int | None, resume_from: str | None, refused: str | None
) -> None:
    run = Path(write_run(tmp_path / "run", status=status, step=step))
    if status == "":
        (run / "summary.json").write_text("")
    named = resume_from.format(run=run) if isinstance(resume_from, str) else resume_from
    if refused is None:
        check_directory(run, named)
    else:
        with pytest.raises(
            ConfigError, match=rf"there is a run in it \({refused}\); choose another directory"
        ) as error:
            check_directory(run, named)
        remedy = {2: ", or continue it with", None: "" if refused == "completed" else ", or repeat it with"}[step]
        assert remedy in str(error.value)
        assert str(error.value).endswith("=auto" if remedy else "directory")


def test_latest_resumes_from_the_run_that_was_started_last(
    chosen: Chosen, write_run: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, newest = write_run(DAY / "02-00-00", status="completed"), write_run(DAY / "01-00-00", status="failed")
    run_dir, resume_from = chosen("train.resume_from_checkpoint=latest")
    assert resume_from == newest
    assert run_dir not in (other, newest)
    monkeypatch.setenv(BY_US, newest)  # a process that a run has started, whose directory is the newest by now
    assert chosen("train.resume_from_checkpoint=latest") == (newest, other)


def test_latest_is_evaluated_as_its_directory_would_be(
    write_run: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = write_run(DAY / "01-00-00")
    (Path(run) / ".hydra" / "overrides.yaml").write_text("[]")
    (Path(run) / "model").mkdir()
    assert command_line(["latest", "evaluate.samples=2"]) == command_line([run, "evaluate.samples=2"])


def test_another_command_does_not_write_into_a_run(write_run: Write, tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    for place in (NEW, "${oc.env:HOME}/elsewhere", str(tmp_path / "run" / "evaluate")):
        check_no_run(OmegaConf.create({"dir": place}))
    with pytest.raises(ConfigError, match="there is a run in it; choose another directory"):
        check_no_run(OmegaConf.create({"dir": str(tmp_path / "run")}))


def test_a_run_in_an_odd_path_can_be_evaluated(write_run: Write, tmp_path: Path) -> None:
    run = Path(write_run(tmp_path / "q=1, it's [a] \\"))
    (run / ".hydra" / "overrides.yaml").write_text("[]")
    (run / "model").mkdir()
    parsed = OverridesParser.create().parse_overrides(command_line([str(run), "evaluate.samples=2"]))
    assert [override.value() for override in parsed] == [str(run / "model"), str(run / "evaluate"), 2]
