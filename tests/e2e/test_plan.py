"""The plan on the command line, and training that is planned first."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from grpo.extras.testing import commands

LARGE = ["+gpu=rtx3080", "model=llama3_1_8b", "peft=none"]
QUICK = ["train.max_steps=3", "train.per_device_train_batch_size=8", "task.dataset.size=64", "task.eval.size=8"]


def command(module: str, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return commands.command(module, "hydra.run.dir=run", *arguments, cwd=cwd, environment={"COLUMNS": "120"})


def test_a_plan_that_fits_is_a_table_a_verdict_and_a_file(tmp_path: Path) -> None:
    done = command("grpo.plan", tmp_path, "+gpu=rtx3080", "model=llama3_2_3b", "train.num_generations=16")
    assert done.returncode == 0, done.stderr
    for text in (
        "load",
        "rollout",
        "log-probabilities",
        "update",
        "kv cache",
        "total",
        "peak",
        "headroom",
        "host memory",
        "fits",
    ):
        assert text in done.stdout
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["fits"] is True


def test_a_plan_for_several_gpus_covers_each_gpu_and_one_host(tmp_path: Path) -> None:
    line = ("+gpu=a100_40gb", "model=qwen2_5_7b", "peft=none", "launch.processes=8", "plan.host_gb=760")
    done = command("grpo.plan", tmp_path, *line, "shard=none")
    assert done.returncode == 1
    assert done.stdout.startswith("Qwen/Qwen2.5-7B-Instruct on 8 x NVIDIA A100 40GB, memory of each")
    assert "shard=fsdp2" in done.stdout.partition("changes that would fit:")[2].split("\n")[1]
    done = command("grpo.plan", tmp_path, *line, "shard=fsdp2")
    assert done.returncode == 0, done.stdout
    assert "unsharded weights" in done.stdout
    assert "host memory per machine 62.6 GiB of 760.0 GiB" in done.stdout


def test_stdout_is_json_alone_and_the_status_says_if_it_fits(tmp_path: Path) -> None:
    done = command("grpo.plan", tmp_path, *LARGE, "plan.format=json")
    plan = json.loads(done.stdout)
    assert (done.returncode, done.stderr, plan["fits"]) == (1, "", False)
    assert plan == json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["suggestions"]
    assert all("=" in word for suggestion in plan["suggestions"] for word in suggestion["overrides"])


@pytest.mark.parametrize("arguments", [(), ("plan.format=json",), ("-m", "train.num_generations=4,8")])
def test_planning_leaves_no_folder_behind(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = commands.command("grpo.plan", *arguments, "+gpu=rtx3080", cwd=tmp_path)
    assert (done.returncode, list(tmp_path.iterdir())) == (0, []), done.stderr


@pytest.mark.slow
@pytest.mark.long
def test_the_picture_of_the_table_is_kept_where_it_is_said_to_be(tmp_path: Path) -> None:
    done = commands.command("grpo.plan", "+gpu=rtx3080", "plan.table=true", cwd=tmp_path)
    assert (tmp_path / done.stdout.split()[-1]).is_file()


def test_planning_loads_neither_pytorch_nor_transformers(tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv[1:] = ['+gpu=h100', 'hydra.run.dir=run']; from grpo.plan import main; main(); "
        "sys.exit(', '.join({'torch', 'transformers', 'trl', 'huggingface_hub'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


@pytest.mark.parametrize(
    ("line", "models"),
    [
        (["+gpu=a100_80gb"], ["qwen3_0_6b", "qwen3_32b"]),
        (["+gpu=rtx3080", "model=llama3_2_3b"], ["llama3_2_1b", "llama3_1_8b"]),
    ],
)
def test_the_table_has_the_models_of_the_chosen_family(tmp_path: Path, line: list[str], models: list[str]) -> None:
    done = command("grpo.plan", tmp_path, *line, "plan.table=true", "plan.format=json")
    assert done.returncode == 0, done.stderr
    table = json.loads(done.stdout)
    assert table == json.loads((tmp_path / "run" / "plan.json").read_text())
    assert (tmp_path / "run" / "plan.png").read_bytes().startswith(b"\x89PNG")
    cells = {(cell["method"], cell["model"]): cell for cell in table["cells"]}
    sizes = list(dict.fromkeys(cell["model"] for cell in table["cells"]))
    assert [sizes[0], sizes[-1]] == models
    for method in ("full", "+ gradients offloaded to CPU", "LoRA", "QLoRA"):
        peaks = [cells[method, model]["peak_gb"] for model in sizes]
        assert peaks == sorted(peaks), "larger models take more"
    for cell in cells.values():
        assert cell["fits"] == (cell["peak_gb"] <= 0.92 * table["capacity_gb"])
        assert bool(cell["completions_at_once"]) == cell["fits"]


@pytest.mark.slow
@pytest.mark.long
def test_the_longest_completion_fits_and_a_longer_one_does_not(tmp_path: Path) -> None:
    profile = ["+gpu=rtx3080", "model=qwen2_5_3b"]
    done = command("grpo.plan", tmp_path, *profile, "plan.longest=true", "plan.format=json")
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    assert (tmp_path / "run" / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert content["max_position_embeddings"] == 32768
    lengths = content["longest"]
    assert lengths["full"]["transformers"] == 0, "3B does not fit"
    assert lengths["QLoRA"]["vLLM asleep in updates"] is None, "of 4-bit weights vLLM cannot be sent new ones"
    length = lengths["LoRA, offloaded"]["transformers"]
    line = [*profile, "generation=transformers", "update.activations_on_host=true", "update.mlp_tile=4096"]
    for tokens, status in ((length, 0), (length + 256, 1)):
        assert command("grpo.plan", tmp_path, *line, f"train.max_completion_length={tokens}").returncode == status
    assert length > 100_000
    assert lengths["LoRA"]["transformers"] > 25_000, "adapters keep their inputs once"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan.table=true", "plan.longest=true"], "plan.table=true plan.longest=true: one table at a time"),
        (["plan.format=yaml"], "plan.format=yaml: unknown; possible: json, text"),
        (["+gpu=rtx3080", "gpu.memory_gb=-1"], "gpu.memory_gb=-1.0: the GPU's memory in GiB"),
        (["+gpu=any", "model.model_name_or_path=no/thing"], "model.model_name_or_path=no/thing: neither a folder nor"),
    ],
)
def test_a_wrong_question_is_answered_in_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = command("grpo.plan", tmp_path, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"grpo.plan: {message}")
    assert done.stderr.count("\n") == 1


def test_training_what_does_not_fit_stops_before_loading(tmp_path: Path) -> None:
    done = command("grpo.train", tmp_path, *LARGE)
    assert done.returncode == 2
    assert done.stderr.startswith("grpo.train: does not fit: ")
    assert "try peft=qlora" in done.stderr
    assert "plan.enforce=false" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.long
def test_a_forced_run_stops_before_host_memory_is_used_up(
    tmp_path: Path,
) -> None:
    refused = command("grpo.train", tmp_path, *QUICK, "plan.host_gb=0.2")
    assert (refused.returncode, "does not fit" in refused.stderr) == (2, True)
    done = command("grpo.train", tmp_path, *QUICK, "plan.host_gb=0.2", "plan.enforce=false")
    assert done.returncode == 130
    assert "host memory nearly used up after step 1" in done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("stopped", 1)
    assert (tmp_path / "run" / "checkpoint-1" / "trainer_state.json").exists()


def test_a_run_keeps_its_plan_and_its_readings_beside_it(tmp_path: Path) -> None:
    done = command("grpo.train", tmp_path, *QUICK)
    assert done.returncode == 0, done.stderr
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert plan["fits"] is True
    assert summary["planned_gb"]["peak"] == pytest.approx(plan["peak_gb"])
    assert summary["memory/host_gb"] == pytest.approx(plan["peak_gb"], rel=0.5)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for name in ("memory/generate_gb", "memory/update_gb", "memory/host_gb"):
        assert all(0.1 < row[name] <= summary[name] for row in rows), name
    assert f"planned {plan['peak_gb']:.2f} GiB, used" in done.stdout
