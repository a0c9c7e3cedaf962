"""The file of measurements: its cases, its schema, and what it may not say."""

import copy
import functools
import getpass
import json
import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from benchmarks.measured.__main__ import as_table, ratios, read_all
from grpo.config.schema import ROOT
from grpo.extras.measuring import cases as planned
from grpo.extras.measuring.record import SCHEMA, as_row, machine, read_record, slug
from grpo.planning.machine import Machine
from grpo.utils.errors import ConfigError
from grpo.utils.limits import GB

COMMITTED = ROOT / "benchmarks" / "measured"
SIZES = {"logprobs": 1.0, "update": 2.0, "peak": 2.5}
DONE = {"outcome": "measured", "measured_gb": SIZES, "reserved_gb": None, "seconds_per_update": 0.1, "oom_retries": 0}


pytestmark = pytest.mark.usefixtures("composed")


@functools.cache
def written() -> str:
    results = [DONE, {"outcome": "out of memory"}, {"outcome": "failed", "error": "RuntimeError"}]
    rows = [as_row(case, result) for case, result in zip(planned.cases("cpu"), results, strict=False)]
    return json.dumps(machine("cpu") | {"cases": rows})


def record() -> dict[str, Any]:
    """A file with a case of each outcome, as the command writes it."""
    return json.loads(written())


def test_cases_are_planned_and_fit_a_small_gpu_with_fewer_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Machine("cuda", "a GPU", 12 * GB, 64 * GB, total=12 * GB)
    monkeypatch.setattr(planned, "machine_for", lambda config: gpu)
    found = planned.cases("cuda")
    assert len({case.name for case in found}) == len(found) == 19
    assert all(case.planned["peak"] <= planned.ROOM * 12 for case in found)
    assert len({case.layers for case in found}) > 3, "they depend on the method"
    for case in found:
        assert case.planned.keys() == {"logprobs", "update", "peak"} | ({"generate"} if not case.long else set())
    peaks = {case.method: case.planned["update"] / case.layers for case in found if case.long}
    assert peaks["LoRA + activations offloaded"] < peaks["LoRA"]


def test_a_file_passes_its_schema_and_names_nobody(tmp_path: Path) -> None:
    Draft202012Validator.check_schema(SCHEMA)
    for file in (tmp_path / "measure-cpu.json", *COMMITTED.glob("*.json")):
        if not file.exists():
            file.write_text(json.dumps(record()))
        text = json.dumps(read_record(file))
        for secret in (socket.gethostname(), str(Path.home()), str(ROOT), os.getcwd()):
            assert secret not in text
        assert "/" not in text
        assert getpass.getuser() not in re.findall(r"[\w-]+", text)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("host", "node7", "Additional properties"),
        ("device", "/dev/nvidia0", "does not match"),
        ("cases.0.error", "No such file: /home/me", "does not match"),
        ("cases.0.overrides.0", "model=/home/me/model", "does not match"),
        ("cases.0.planned_gb", {"update": 1.0}, "required"),
        ("cases.1.outcome", "measured", "required"),
        ("cases.1.measured_gb", SIZES, "should not be valid"),
    ],
)
def test_what_the_schema_lacks_is_refused(place: str, value: Any, message: str, tmp_path: Path) -> None:
    content, file = record(), tmp_path / "measure-cpu.json"
    *parents, last = (int(word) if word.isdigit() else word for word in place.split("."))
    changed: Any = content
    for parent in parents:
        changed = changed[parent]
    changed[last] = copy.deepcopy(value)
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message):
        read_all(tmp_path)


def test_the_reader_prints_the_ratio_and_counts_lacking_results(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"python -m grpo\.measure"):
        read_all(tmp_path)
    (tmp_path / "measure-cpu.json").write_text(json.dumps(record()))
    (content,) = read_all(tmp_path)
    (case, lacking, failed) = content["cases"]
    assert ratios([case, lacking], "update") == [case["planned_gb"]["update"] / 2.0]
    assert list(as_table([content]).columns[-1].cells) == ["", "out of memory", "failed"]
    assert failed["error"] == "RuntimeError"
    (tmp_path / "measure-gpu.json").write_text("{")
    with pytest.raises(ConfigError, match="broken JSON"):
        read_all(tmp_path)


def test_the_name_of_a_gpu_becomes_the_name_of_its_file() -> None:
    assert slug("NVIDIA GeForce RTX 3080 Laptop GPU") == "nvidia-geforce-rtx-3080-laptop-gpu"
    assert slug("AMD Radeon (TM) Pro/W7900") == "amd-radeon-tm-pro-w7900"
