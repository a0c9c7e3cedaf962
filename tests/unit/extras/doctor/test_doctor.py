"""The command prints findings, as text and as JSON, and refuses other input in a line."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import doctor as benchmark
from grpo import doctor
from grpo.config.schema import ROOT
from grpo.extras.doctor.read import read
from tests.unit.extras.doctor import logs


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["grpo.doctor", *map(str, words)])
    doctor.main()


def test_findings_are_printed_with_evidence_and_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    run(monkeypatch, logs.trl(tmp_path, logs.learning(learning_rate=0.0)))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"TRL, {tmp_path / 'trainer_state.json'}: steps 1 to 40, 40 logged, 0 completions"
    assert lines[1:3] == [
        "error: The learning rate is 0 in every step: nothing is trained",
        "    learning_rate 0 in all 40 logged steps",
    ]
    assert lines[-1].startswith("not judged, as not logged: distance from the reference (kl); engine against policy")


def test_a_healthy_run_has_no_issues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    run(monkeypatch, logs.trl(tmp_path, logs.learning()))
    assert capsys.readouterr().out.splitlines()[1] == "no issues found"


def test_json_has_the_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    run(monkeypatch, "--json", logs.swift(tmp_path, logs.learning(grad_norm=0.0)))
    content = json.loads(capsys.readouterr().out)
    (finding,) = (finding for finding in content["findings"] if finding["severity"] != "info")
    assert finding["name"] == "gradient_zero"
    assert set(finding) == {"name", "title", "evidence", "advice", "severity"}
    assert (content["steps"], content["logged"], content["completions"]) == ([1, 40], 40, 0)
    assert content["not_judged"]


def test_others_text_cannot_control_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    folder = tmp_path / "[red]run\x1b[2J"
    folder.mkdir()
    hostile = {"rewards/\x1b]0;stolen\x07[bold]/mean": 0.0, "rewards/\x1b]0;stolen\x07[bold]/std": 0.0}
    hostile |= {"rewards/${nothing}/mean": 0.5, "rewards/${nothing}/std": 0.5}
    run(monkeypatch, logs.trl(folder, logs.learning(**hostile)))
    printed = capsys.readouterr().out
    assert "[bold] gave 0, or None, to every completion" in printed
    assert "\x1b" not in printed
    assert "\x07" not in printed
    assert r"reward.\x1b]0;stolen\x07[bold] gave 0, or None, to every completion" in printed
    assert r"[red]run\x1b[2J" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "nothing: no such file or directory; name trainer_state.json of TRL"),
        ([], "the following arguments are required: PATH"),
        ([".", "--config", "nothing.yaml"], "nothing.yaml: no such file"),
        ([".", "--config", "train.py"], "train.py: a Python script is not converted"),
        (["."], ".: no step of a run in it; name trainer_state.json of TRL"),
    ],
)
def test_wrong_input_is_a_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    with pytest.raises(SystemExit) as left:
        run(monkeypatch, *words)
    assert left.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"grpo.doctor: {message}")
    assert printed.err.count("\n") == 1


def test_a_configuration_gives_the_commands_of_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    config = tmp_path / "my run.yaml"
    config.write_text("model_name_or_path: Qwen/Qwen3-0.6B\ndataset_name: trl-lib/DeepMath-103K\n")
    run(monkeypatch, logs.trl(tmp_path, logs.learning()), "--config", config)
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"the same run here: python -m grpo.from_trl '{config}' && "
        "python -m grpo.plan --config-dir . +gpu=any '+experiment=my run'"
    )


def test_the_model_beside_the_logs_can_be_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    logs.trl(tmp_path, logs.learning())
    (tmp_path / "checkpoint-40").mkdir()
    adapter = tmp_path / "checkpoint-40" / "adapter_config.json"
    adapter.write_text('{"base_model_name_or_path": "org/a model", "r": 16}')
    run(monkeypatch, tmp_path)
    shown = "python -m grpo.plan +gpu=any 'model.model_name_or_path='\"'\"'org/a model'\"'\"'' peft=lora peft.r=16"
    assert capsys.readouterr().out.splitlines()[-1] == f"the same run here: {shown}"
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    run(monkeypatch, "--json", tmp_path)
    (shown,) = json.loads(capsys.readouterr().out)["plan"]
    assert shown == f"python -m grpo.plan +gpu=any 'model.model_name_or_path='\"'\"'{tmp_path}'\"'\"'' peft=none"


class Touch:
    """A pickle that creates a file when it is loaded."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple:
        return os.mknod, (str(self.file),)


def test_a_pickle_is_not_loaded_and_no_heavy_library_is(tmp_path: Path) -> None:
    logs.trl(tmp_path, logs.learning())
    (tmp_path / "training_args.bin").write_bytes(pickle.dumps(Touch(tmp_path / "loaded")))
    script = "import sys, grpo.doctor; grpo.doctor.main(); sys.exit('torch' in sys.modules or 'trl' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script, tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "loaded").exists()


def test_the_table_of_the_docs_is_the_benchmark() -> None:
    rows = json.loads(benchmark.RESULT.read_text())["runs"]
    assert benchmark.table(rows) in benchmark.PAGE.read_text(), "python -m benchmarks.doctor"
    faults = [row for row in rows if row["expected"]]
    assert sum(map(benchmark.is_reported, faults)) >= 0.8 * len(faults)
    assert [row["name"] for row in rows if not row["expected"] and benchmark.alarms(row)] == []


def test_the_docs_show_what_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    command, _, shown = benchmark.PAGE.read_text().split("```console\n$ ")[1].split("```")[0].partition("\n")
    monkeypatch.chdir(ROOT)
    run(monkeypatch, command.removeprefix("python -m grpo.doctor "))
    printed = capsys.readouterr().out
    for part in shown.split("…\n"):
        assert part in printed


@pytest.mark.parametrize("name", benchmark.NAMES)
def test_stored_logs_have_the_findings_of_the_benchmark(name: str) -> None:
    (row,) = (row for row in json.loads(benchmark.RESULT.read_text())["runs"] if row["name"] == name)
    assert benchmark.named(read(benchmark.STORED / name.replace(" ", "_"))[0]) == row["findings_of_metrics"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["temperature 0.02", "engine with old weights", "seed 1"])
def test_a_run_is_trained_and_diagnosed(tmp_path: Path, name: str) -> None:
    from benchmarks.doctor_runs import FAULTS, HEALTHY, trained

    cases = {case.name: case for case in (*FAULTS, *HEALTHY)}
    assert list(cases) == [row["name"] for row in json.loads(benchmark.RESULT.read_text())["runs"]]
    trained(cases[name], tmp_path, steps=30)
    row: dict[str, Any] = benchmark.result(name, list(cases[name].expected), tmp_path)
    assert bool(benchmark.alarms(row)) == benchmark.is_reported(row) == bool(row["expected"])
