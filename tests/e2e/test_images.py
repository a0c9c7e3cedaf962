"""Policies that see images, trained and used as from a terminal."""

import itertools
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pandas import read_parquet
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoProcessor

from grpo.config.schema import ROOT
from grpo.extras.testing.commands import command
from tests.e2e.vllm_runs import FILTERS
from tests.unit.trainer.rollout.test_tool_calls import WITH_IMAGES
from tests.vision_policies import make_policy, make_processor

SMALL = ["task=shapes", "task.dataset.size=32", "task.eval.size=8", "train.max_steps=2", "train.bf16=false"]
SMALL += ["train.per_device_train_batch_size=8", "train.num_generations=4"]
TORCHVISION = ROOT / ".venv" / "torchvision"
REMEDY = ROOT / "tests" / "torchvision_on_cpus"
needs_torchvision = pytest.mark.skipif(not TORCHVISION.is_dir(), reason="needs torchvision: make extras")
QUICK = {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
"""vLLM compiles a function of its sampler otherwise, and fills a larger cache, each of which takes seconds."""
ODD = "def odd(completion_ids, **columns):\n    return [sum(i) % 7 for i in completion_ids]\n"
BUILT_IN = ROOT / "grpo" / "builtin" / "tiny_vision"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the built-in vision policy with LoRA."""
    folder = tmp_path_factory.mktemp("shapes") / "run"
    done = command(
        "grpo.train", "+experiment=shapes", *SMALL, "peft=lora", f"hydra.run.dir={folder}", cwd=folder.parent
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.long
def test_a_run_with_images_is_evaluated_exported_and_asked(run_dir: Path) -> None:
    """The merged export answers as the run's own model does."""
    trained = json.loads((run_dir / "evaluation.json").read_text())["after"]
    again = command("grpo.evaluate", run_dir, "evaluate.samples=0", cwd=run_dir)
    assert again.returncode == 0, again.stderr
    found = json.loads((run_dir / "evaluate" / "evaluation.json").read_text())
    assert (found["accuracy"], found["samples"]) == (trained["accuracy"], 8)
    done = command("grpo.export", run_dir, "--output", run_dir / "out", cwd=run_dir)
    assert done.returncode == 0, done.stderr
    assert "load it with AutoModelForImageTextToText.from_pretrained" in done.stdout
    assert "pipeline_tag: image-text-to-text" in (run_dir / "out" / "README.md").read_text()
    assert AutoProcessor.from_pretrained(run_dir / "out").image_processor.size["height"] == 96
    exported = command(
        "grpo.evaluate", run_dir / "out", *SMALL[:3], "evaluate.samples=0", f"hydra.run.dir={run_dir}/b", cwd=run_dir
    )
    assert exported.returncode == 0, exported.stderr
    assert json.loads((run_dir / "b" / "evaluation.json").read_text())["accuracy"] == trained["accuracy"]

    image = Image.new("RGB", (96, 96), "white")
    image.paste((214, 39, 40), (30, 30, 50, 50))
    image.save(run_dir / "red.png")
    asked = command("grpo.chat", run_dir, "--image", "red.png", "Which shape is the largest?", cwd=run_dir)
    assert asked.returncode == 0, asked.stderr
    assert "red" in asked.stdout
    wrong = command("grpo.chat", run_dir, "--image", "none.png", "Which shape is the largest?", cwd=run_dir)
    assert wrong.returncode == 2
    assert "--image: there is no file" in wrong.stderr


def with_torchvision(*commands: list[object], cwd: Path) -> None:
    """Run commands one after the other where torchvision can be imported, all to their successful end."""
    folders = ":".join(map(str, (REMEDY, ROOT, TORCHVISION)))
    code = "from grpo.extras.testing.commands import one_after_the_other; one_after_the_other()"
    done = subprocess.run(
        [sys.executable, "-c", code, *(json.dumps(line, default=str) for line in commands)],
        env={**os.environ, "PYTHONPATH": folders, "OMP_NUM_THREADS": "1", **QUICK},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@needs_torchvision
@pytest.mark.slow
@pytest.mark.long
def test_qwens_own_processor_shows_images_within_the_pixel_limit(tmp_path: Path) -> None:
    """A tiny Qwen2.5-VL, its tower frozen."""
    folder = save_qwen(tmp_path / "qwen")
    before = load_file(folder / "model.safetensors")
    (tmp_path / "odd.py").write_text(ODD)
    line = [*SMALL, f"model.model_name_or_path={folder}", "+reward.odd.fn=odd.py:odd", "model.freeze=[vision]"]
    line += ["task.max_pixels=2304", f"hydra.run.dir={tmp_path}/run"]
    with_torchvision(["grpo.train", *line], cwd=tmp_path)
    saved = json.loads((tmp_path / "run" / "model" / "processor_config.json").read_text())
    assert saved["processor_class"] == "Qwen2_5_VLProcessor"
    assert saved["image_processor"]["size"] == {"longest_edge": 2304, "shortest_edge": 64}
    after = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert before.keys() == after.keys()
    same = {name for name in before if before[name].equal(after[name].to(before[name].dtype))}
    assert same
    assert all(".blocks." in name or "patch_embed" in name for name in same)


EIGHT_BITS = ["peft=lora", "model.dtype=bfloat16", "engine.quantization=fp8_per_channel"]


@needs_torchvision
@pytest.mark.vllm
@pytest.mark.long
def test_vllm_sees_the_images_that_the_policy_sees(tmp_path: Path) -> None:
    """Its log-probabilities are the policy's, with rows of one image, of two and of none; so are its greedy answers."""
    folder = save_qwen(tmp_path / "qwen")
    (tmp_path / "odd.py").write_text(ODD)
    draw = random.Random(0)
    rows = []
    for row in range(24):
        names = [f"{row}-{place}.png" for place in range(row % 3)]
        for name in names:
            size = (draw.randint(20, 60), draw.randint(20, 60))
            Image.frombytes("RGB", size, draw.randbytes(size[0] * size[1] * 3)).save(tmp_path / name)
        rows.append({"image": names, "question": f"How many {row} ?", "answer": "3"})
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = ["task=jsonl", "task.dataset.path=problems.jsonl", "task.images=image", "task.eval.size=8", *SMALL[3:]]
    line += ["task.split=train", "task.eval.split=train", f"model.model_name_or_path={folder}", "model.dtype=float32"]
    line += ["generation=vllm_colocate", "reward=correctness", "train.max_completion_length=8", "task.max_pixels=2304"]
    again = ["task.split='train[10:12]'", "train.max_steps=3", "train.num_train_epochs=3", "+reward.odd.fn=odd.py:odd"]
    line.append("train.learning_rate=1e-2")
    commands = [
        ["grpo.train", *line, *again, f"hydra.run.dir={tmp_path}/run"],
        ["grpo.train", *line, "peft=lora", *FILTERS, f"hydra.run.dir={tmp_path}/lora"],
        ["grpo.train", *line, *EIGHT_BITS, f"hydra.run.dir={tmp_path}/fp8"],
    ]
    for model, engine in itertools.product(("run", "lora"), ("transformers", "vllm_colocate")):
        end = [f"generation={engine}", "evaluate.samples=0", f"hydra.run.dir={tmp_path}/{model}-{engine}"]
        commands.append(["grpo.evaluate", tmp_path / model / "model", *line, *end])
    with_torchvision(*commands, cwd=tmp_path)

    seen = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert seen[0]["engine/logp_difference"] < 1e-3
    assert len(seen) == 3
    assert max(row["sampling/sampling_logp_difference/max"] for row in seen) < 1e-3, "of images that come again too"
    adapted = [json.loads(line) for line in (tmp_path / "lora" / "metrics.jsonl").read_text().splitlines()]
    assert len(adapted) > 1
    assert max(row["sampling/sampling_logp_difference/max"] for row in adapted) < 1e-3
    assert all(row["sampling/kept_mass"] < 0.9999 for row in adapted)
    quantized = json.loads((tmp_path / "fp8" / "metrics.jsonl").read_text().splitlines()[0])
    assert 0 < quantized["engine/logp_difference"] < quantized["engine/tolerance"]
    for model in ("run", "lora"):
        files = [tmp_path / f"{model}-{engine}" / "completions.jsonl" for engine in ("transformers", "vllm_colocate")]
        answers = [[json.loads(row)["completion"] for row in file.read_text().splitlines()] for file in files]
        assert answers[0] == answers[1]
        assert len(answers[0]) == 8


LOOK = """
from pandas import read_parquet
from PIL import Image
def calculator(expression: str) -> list:
    \"\"\"Look closer.

    Args:
        expression: where
    \"\"\"
    return ["now", Image.new("RGB", (56, 28), "red")] if expression == "1" else Image.new("RGB", (80, 70), "blue")
"""
FIRST_TURNS = """
from transformers import TrainerCallback
class FirstTurns(TrainerCallback):
    \"\"\"Lets two of three completions begin with a call, whose log-probabilities are unknown.\"\"\"
    def __init__(self, trainer):
        real, tokenizer = trainer._generate_single_turn, trainer.processing_class.tokenizer
        call = '<tool_call>{"name": "calculator", "arguments": {"expression": "%d"}}</tool_call>'
        def turn(prompts, *args, **options):
            ids, logps = real(prompts, *args, **options)
            for row, prompt in enumerate(prompts):
                if row % 3 and tuple(prompt) in trainer.rollouts.completer._begun:
                    ids[row] = [*tokenizer(call % (row % 3))["input_ids"], tokenizer.eos_token_id]
                    if logps:
                        logps[row] = [None] * len(ids[row])
            return ids, logps
        trainer._generate_single_turn = turn
"""


@needs_torchvision
@pytest.mark.parametrize(
    "engine", [pytest.param("transformers", marks=pytest.mark.slow), pytest.param("vllm", marks=pytest.mark.vllm)]
)
@pytest.mark.long
def test_the_policy_sees_the_images_that_tools_return(tmp_path: Path, engine: str) -> None:
    """Log-probabilities of turns after an image are the policy's; tables, rewards and pages have the rest as text."""
    folder = save_qwen(tmp_path / "qwen", base="tiny_calculator", template=WITH_IMAGES)
    for name, text in {"look.py": LOOK, "turns.py": FIRST_TURNS, "odd.py": ODD}.items():
        (tmp_path / name).write_text(text)
    Image.new("RGB", (40, 30), "green").save(tmp_path / "0.png")
    rows = [{"image": ["0.png"] * (row % 2), "question": f"How many {row} ?", "answer": "3"} for row in range(24)]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = ["task=jsonl", "task.dataset.path=problems.jsonl", "task.images=image", "task.eval.size=8", *SMALL[3:]]
    line += ["task.split=train", "task.eval.split=train", f"model.model_name_or_path={folder}", "model.dtype=float32"]
    line += ["task.tools=[look.py:calculator]", "+reward.odd.fn=odd.py:odd", "train.max_completion_length=90"]
    line += ["+callbacks.turns.fn=turns.py:FirstTurns", "train.max_steps=2", "train.max_tool_calling_iterations=2"]
    line += ["task.max_pixels=2304", "rollout.dynamic_sampling=true"]
    line += ["generation=vllm_colocate"] if engine == "vllm" else []
    with_torchvision(["grpo.train", *line, f"hydra.run.dir={tmp_path}/run"], cwd=tmp_path)
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(step["tools/calculator/calls"] > 0 == step["tools/calculator/errors"] for step in steps)
    if engine == "vllm":
        assert max(step["sampling/sampling_logp_difference/max"] for step in steps) < 1e-3
    table = read_parquet(tmp_path / "run" / "completions" / "completions_00002.parquet")
    messages = [message for completion in table["completion"] for message in completion]
    results = {message["content"] for message in messages if message["role"] == "tool"}
    assert results == {"now [image, 56 x 28]", "[image, 80 x 70]"}


def save_qwen(folder: Path, base: str = "tiny", template: str = "") -> Path:
    """Save a tiny Qwen2.5-VL in a folder as it is on the hub."""
    processor = make_processor("qwen2_5_vl", base=base)
    processor.chat_template = template or processor.chat_template
    make_policy("qwen2_5_vl", processor).save_pretrained(folder)
    processor.tokenizer.save_pretrained(folder)
    processor.image_processor.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(processor.chat_template)
    file = folder / "preprocessor_config.json"
    kinds = {"processor_class": "Qwen2_5_VLProcessor", "image_processor_type": "Qwen2VLImageProcessor"}
    file.write_text(json.dumps(json.loads(file.read_text()) | kinds))
    return folder


@pytest.mark.slow
@pytest.mark.long
def test_what_images_cannot_be_used_with_fails_with_one_line(tmp_path: Path) -> None:
    qwen, halved = save_qwen(tmp_path / "qwen"), tmp_path / "halved"
    shutil.copytree(BUILT_IN, halved, ignore=shutil.ignore_patterns("p*.json", "__pycache__"))
    cases = {
        "peft.vision=true: task.images is not set": ["task=arithmetic", "peft=lora", "peft.vision=true"],
        "the model takes text alone": ["model=tiny"],
        "its processor is missing (preprocessor_config.json)": [f"model.model_name_or_path={halved}"],
        "its processor needs torchvision: pip install": [f"model.model_name_or_path={qwen}"],
        "model.freeze: towers: unknown; possible: vision, projector": ["model.freeze=[towers]"],
        "model.freeze: vision: the model has none": ["task=arithmetic", "model=tiny", "model.freeze=[vision]"],
        "task.min_pixels=100 task.max_pixels=10": ["task.min_pixels=100", "task.max_pixels=10"],
    }
    for says, overrides in cases.items():
        done = command("grpo.train", *SMALL, "model=tiny_vision", *overrides, cwd=tmp_path)
        assert done.returncode == 2, (says, done.stderr, done.stdout)
        (line,) = [line for line in done.stderr.splitlines() if line.startswith("grpo.train: ")]
        assert says in line
        assert "Traceback" not in done.stderr
