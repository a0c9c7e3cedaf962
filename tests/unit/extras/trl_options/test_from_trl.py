"""TRL's YAML and command lines become experiments with the settings that TRL itself reads from them."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.singleton import Singleton
from omegaconf import DictConfig, OmegaConf
from trl import GRPOConfig, get_peft_config
from trl.scripts.grpo import make_parser

from grpo import from_trl
from grpo.config.schema import ROOT, train_arguments
from grpo.extras.trl_options.convert import KEPT
from grpo.extras.trl_options.read import options_of
from grpo.utils.errors import ConfigError

PLAIN = {
    "model_name_or_path": "Qwen/Qwen3-0.6B",
    "dataset_name": "trl-lib/DeepMath-103K",
    "use_cpu": True,
    "bf16": False,
}
ADAPTED = PLAIN | {"use_peft": True, "lora_r": 8, "lora_target_modules": ["q_proj", "v_proj"], "load_in_4bit": True}
MODEL = ["trl", "grpo", "--model_name_or_path", "org/name"]
TUNED = PLAIN | {
    **{"learning_rate": "1e-5", "num_generations": 4, "beta": 0.04, "loss_type": "dr_grpo", "scale_rewards": "none"},
    **{"epsilon_high": 0.28, "max_completion_length": 1024, "lr_scheduler_type": "cosine", "dtype": "bfloat16"},
    **{"gradient_accumulation_steps": 4, "generation_kwargs": {"min_tokens": 2}, "eval_strategy": "no"},
}


@pytest.fixture
def converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., DictConfig]]:
    """Runs the command in an empty folder, and composes what it has written."""
    monkeypatch.chdir(tmp_path)
    state = Singleton.get_state()  # of all tests
    GlobalHydra.instance().clear()

    def run(*words: str) -> DictConfig:
        monkeypatch.setattr(sys, "argv", ["grpo.from_trl", "--output", "experiment/found.yaml", *words])
        from_trl.main()
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            return compose("config", [f"hydra.searchpath=[file://{tmp_path}]", "+experiment=found"])

    yield run
    Singleton.set_state(state)


def by_trl(options: dict[str, Any]) -> tuple[Any, GRPOConfig, Any, Any]:
    """TRL's own reading of the words of these options."""
    words = []
    for name, value in options.items():
        texts = (
            [json.dumps(value)]
            if isinstance(value, dict)
            else [str(v) for v in value]
            if isinstance(value, list)
            else [str(value)]
        )
        words += [f"--{name}", *texts]
    return make_parser().parse_args_and_config([*words, "--output_dir", "there"])


@pytest.mark.parametrize("form", ["YAML", "words"])
@pytest.mark.parametrize("options", [PLAIN, ADAPTED, TUNED], ids=["plain", "adapted", "tuned"])
def test_settings_are_those_that_trl_reads(converted: Any, options: dict[str, Any], form: str) -> None:
    if form == "YAML":
        Path("grpo.yaml").write_text(json.dumps(options))
        config = converted("grpo.yaml")
    else:
        pairs = [(name, value if isinstance(value, list) else [value]) for name, value in options.items()]
        texts = [[f"--{n}", *(json.dumps(v) if isinstance(v, dict) else str(v) for v in vs)] for n, vs in pairs]
        config = converted("trl", "grpo", *(word for words in texts for word in words))
    script, wanted, model, _ = by_trl(options)
    found = GRPOConfig(**train_arguments(config.train) | {"output_dir": "there"})
    different = {f.name for f in fields(GRPOConfig) if getattr(found, f.name) != getattr(wanted, f.name)}
    assert different - KEPT - {"logging_dir"} == set()
    assert (config.model.dtype, config.task.dataset.path) == (model.dtype, script.dataset_name)
    if adapter := get_peft_config(model):
        for name in ("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "modules_to_save"):
            assert config.peft.get(name) == getattr(adapter, name), name
        assert set(config.peft.target_modules) == adapter.target_modules
        assert config.peft.quantization.bnb_4bit_use_double_quant == model.use_bnb_nested_quant
    else:
        assert config.peft is None


@pytest.mark.parametrize("options", [PLAIN, ADAPTED, TUNED], ids=["plain", "adapted", "tuned"])
@pytest.mark.parametrize("gpu", ["any", "h100", "rtx3080"])
def test_a_gpu_profile_before_the_experiment_changes_nothing(converted: Any, options: dict[str, Any], gpu: str) -> None:
    Path("grpo.yaml").write_text(json.dumps(options))
    alone = converted("grpo.yaml")
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = compose("config", [f"hydra.searchpath=[file://{Path.cwd()}]", f"+gpu={gpu}", "+experiment=found"])
    given = {key: value for key, value in train_arguments(config.train).items() if key not in KEPT}
    assert given == {key: value for key, value in train_arguments(alone.train).items() if key not in KEPT}
    assert (config.task, config.peft, config.reward) == (alone.task, alone.peft, alone.reward)
    assert config.model.dtype == alone.model.dtype


def test_rewards_keep_their_order_and_weights(converted: Any) -> None:
    names = ["accuracy_reward", "mine.brevity", "get_soft_overlong_punishment"]
    words = (
        "--reward_funcs",
        *names,
        "--reward_weights",
        "1",
        "0.5",
        "0.1",
        "--reward_model_name_or_path",
        "org/judge",
    )
    with pytest.raises(SystemExit):
        converted("trl", "grpo", "--model_name_or_path", "org/name", *words)
    config = converted(
        "trl", "grpo", "--model_name_or_path", "org/name", *words[:-5], "2", "1", "0.5", "0.1", *words[-2:]
    )
    assert list(config.reward) == ["model", "accuracy_reward", "brevity", "get_soft_overlong_punishment"]
    assert [reward.weight for reward in config.reward.values()] == [2, 1, 0.5, 0.1]
    assert config.reward.accuracy_reward.fn == "trl.rewards.accuracy_reward"
    assert config.reward.get_soft_overlong_punishment.kwargs == {"max_completion_length": 1280, "cache": 256}


@pytest.mark.parametrize(
    ("launcher", "processes", "shard"),
    [
        ("accelerate launch --num_processes 4 --config_file zero3 train.py", 4, {"deepspeed"}),
        ("accelerate launch --config_file fsdp2 -m trl.scripts.grpo", 8, {"fsdp"}),
        ("CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=2 train.py", 2, set()),
        ("trl grpo --accelerate_config zero2 --num_processes 2", 2, {"deepspeed"}),
        ("accelerate launch --num_processes 2 --zero_stage 3 --offload_optimizer_device cpu t.py", 2, {"deepspeed"}),
        ("accelerate launch --multi_gpu --num_processes 2 --use_deepspeed --zero_stage 3 train.py", 2, {"deepspeed"}),
    ],
)
def test_launchers_become_processes_and_shards(converted: Any, launcher: str, processes: int, shard: set[str]) -> None:
    words = "--model_name_or_path org/$NAME --run_name my-grpo"
    script = f"#!/bin/bash\necho 'begin\n'\nexport NAME=name\n{launcher} \\\n  {words} \\\n  2>&1 | tee log\n"
    Path("run.sh").write_text(script)
    config = converted("run.sh")
    assert config.launch.processes == processes
    assert {name for name in ("deepspeed", "fsdp") if config.train[name]} == shard
    offloads = "offload_optimizer" in ((config.train.deepspeed or {}).get("zero_optimization") or {})
    assert offloads == ("offload" in launcher)
    assert (config.train.run_name, config.model.model_name_or_path) == ("my-grpo", "org/name")


def test_options_without_a_place_are_named_with_the_way(converted: Any, capsys: pytest.CaptureFixture[str]) -> None:
    Path("grpo.yaml").write_text(
        "model_name_or_path: org/name\ntrust_remote_code: true\noutput_dir: there\nlearnig_rate: 1\neval_strategy: no\n"
    )
    config = converted("grpo.yaml")
    printed = capsys.readouterr().out
    for line in ("trust_remote_code: code from the hub is never run", "hydra.run.dir", "did you mean learning_rate?"):
        assert line in printed
        assert line in Path("experiment/found.yaml").read_text()
    assert config.task.eval.size == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name TRL's YAML"),
        (["none.yaml"], "no such file"),
        (["train.py"], "ExactGRPOTrainer"),
        (["broken.yaml"], "cannot be read as YAML in line 2"),
        (["list.yaml"], "option: value"),
        (["ours.yaml"], "of this project already"),
        (["empty.sh"], "no commands"),
        (["trl", "grpo", "--model_name_or_path", "$MODEL"], "known to the shell alone"),
        (["trl", "grpo"], "has no options"),
        (["two.sh"], "2 commands"),
        (["trl", "sft", "--model_name_or_path", "x"], "trl sft: only the options of `trl grpo`"),
        (["trl", "grpo", "--config", "none.yaml"], "none.yaml: no such file"),
        (["trl", "grpo", "--accelerate_config", "zero9"], "zero9: neither a file of accelerate's, nor one of TRL's: "),
        ([*MODEL, "--reward_funcs", "accuracy_rewrd"], "accuracy_rewrd: TRL has accuracy_reward, "),
        ([*MODEL, "--learning_rate", "fast"], "learning_rate: Value 'fast'"),
        ([*MODEL, "--use_vllm", "--vllm_mode", "foo"], "vllm_mode=foo: colocate or server"),
        (["trl", "grpo", "--learning_rate", "1"], "no model_name_or_path"),
        (["list.yaml", "--outptu", "x"], "--outptu: behind the file stands --output FILE, or nothing"),
        ([*MODEL, "--use_vllm", "maybe"], "use_vllm: maybe: true or false is needed"),
    ],
    ids=str,
)
def test_wrong_input_is_a_line(converted: Any, words: list[str], message: str, capsys: Any) -> None:
    texts = {
        "train.py": "",
        "broken.yaml": "a: 1\n b: [",
        "list.yaml": "[1]",
        "ours.yaml": "train: {}",
        "empty.sh": "ls\n",
    }
    texts["two.sh"] = "trl grpo --beta 0\ntrl grpo --beta 1\n"
    for name, text in texts.items():
        Path(name).write_text(text)
    with pytest.raises(SystemExit) as exit_:
        converted(*words)
    error = capsys.readouterr().err
    assert exit_.value.code == 2
    assert message in error
    assert error.count("\n") == 1
    assert not Path("experiment").exists()


def test_a_file_that_is_there_stays(converted: Any, capsys: pytest.CaptureFixture[str]) -> None:
    converted("trl", "grpo", "--model_name_or_path", "org/name")
    with pytest.raises(SystemExit):
        converted("trl", "grpo", "--model_name_or_path", "org/name")
    assert "is there already" in capsys.readouterr().err


def test_values_of_words_are_yamls() -> None:
    words = ["--a", "1e-6", "--b=true", "--no_c", "--d", '{"x": 1}', "--e", "{question", "--f", "x=y"]
    found = options_of(["trl", "grpo", *words])
    assert found == {"a": 1e-6, "b": True, "c": False, "d": {"x": 1}, "e": "{question", "f": "x=y"}
    with pytest.raises(ConfigError, match="has no options"):
        options_of(["trl", "grpo"])
    assert OmegaConf.create(found).a == 1e-6


@pytest.mark.long
def test_a_converted_run_trains(tmp_path: Path) -> None:
    rows = [{"prompt": f"Mia has {n} apples . She eats 1 . How many ?\n", "solution": str(n - 1)} for n in range(2, 10)]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (tmp_path / "mine.py").write_text(
        "def exact(completions, solution, **columns):\n"
        "    return [float(s in c) for c, s in zip(completions, solution, strict=True)]\n"
    )
    options = {"model_name_or_path": str(ROOT / "grpo/builtin/tiny"), "dataset_name": "data", "max_steps": 1}
    options |= {"reward_funcs": ["mine.exact"], "use_cpu": True, "bf16": False, "max_completion_length": 8}
    (tmp_path / "grpo.yaml").write_text(json.dumps(options))
    for words in (("from_trl", "grpo.yaml"), ("train", "--config-dir", ".", "+experiment=grpo", "hydra.run.dir=run")):
        subprocess.run([sys.executable, "-m", f"grpo.{words[0]}", *words[1:]], cwd=tmp_path, check=True)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", 1)
    logged = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert "rewards/exact/mean" in logged
