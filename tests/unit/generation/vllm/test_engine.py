import os
import threading
import weakref
from contextlib import nullcontext
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TrainerCallback
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

from grpo.builtin.tasks.arithmetic import problems
from grpo.config.schema import ROOT
from grpo.evaluation.in_training import answer
from grpo.generation.transformers.completer import Completer
from grpo.generation.vllm import watched_session
from grpo.generation.vllm.engine import PolicyEngine
from grpo.generation.vllm.policy_weights import merged_weights, trains_tied_weight
from grpo.options import Engine
from grpo.rundir.resume import newest_checkpoint
from grpo.trainer import ExactGRPOTrainer
from grpo.trainer.measurements import MemoryReadings
from grpo.trainer.resume import keep_steps
from grpo.trainer.rollout import engine_check
from grpo.trainer.token_budget import TokenBudget
from grpo.utils.errors import GenerationError
from tests.cuda_driver import GB, CudaDriver
from tests.engine_faults import FAULTS, LORA, check, trainer

TINY = str(ROOT / "grpo" / "builtin" / "tiny")
LINEAR = ["q_proj", "v_proj", "down_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": LINEAR},
    "every linear module": {"target_modules": "all-linear"},
    "rank-stabilized": {"target_modules": LINEAR, "use_rslora": True},
    "dora": {"target_modules": LINEAR, "use_dora": True},
    "embeddings": {"target_modules": [*LINEAR, "embed_tokens"]},
    "a module trained whole": {"target_modules": LINEAR, "modules_to_save": ["norm"]},
}


def policy(kind: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The embedded policy with an adapter that does something."""
    torch.manual_seed(0)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(TINY, dtype=dtype), LoraConfig(r=4, init_lora_weights=False, **KINDS[kind])
    )
    for name, weight in model.named_parameters():
        if "modules_to_save" in name:
            weight.data += 0.5
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_vllm_gets_merged_weights_under_the_names_of_the_base(kind: str) -> None:
    sent = {name: weight.clone() for name, weight in merged_weights(policy(kind))}
    merged = dict(policy(kind).merge_and_unload().named_parameters())
    assert sent.keys() == merged.keys() == dict(AutoModelForCausalLM.from_pretrained(TINY).named_parameters()).keys()
    for name, weight in merged.items():
        assert torch.equal(sent[name], weight), name


@pytest.mark.parametrize("kind", KINDS)
def test_sending_weights_never_changes_a_bit_of_the_policy(kind: str) -> None:
    model = policy(kind)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    for _ in range(20):
        sent = dict(merged_weights(model))  # all at once: what was sent first is not written over
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    again = dict(merged_weights(model))
    assert all(torch.equal(weight, again[name]) for name, weight in sent.items())
    assert not any(getattr(module, "merged_adapters", None) for module in model.modules())


def test_merging_and_unmerging_the_policy_like_trl_changes_bits() -> None:
    model = policy("lora")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    model.merge_adapter()
    model.unmerge_adapter()
    assert not all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_only_one_layer_is_copied_at_a_time() -> None:
    model = policy("every linear module")
    own = {weight.data_ptr() for weight in model.parameters()}
    copies = []
    for _, weight in merged_weights(model):
        if weight.data_ptr() not in own:
            copies.append(weakref.ref(weight))
        assert sum(copy() is not None for copy in copies) <= 1
        assert {weight.data_ptr() for weight in model.parameters()} == own, "the policy has its own weights meanwhile"
        del weight
    assert len(copies) == 4 * 7


@pytest.mark.parametrize(
    ("options", "tied"),
    [
        ({"target_modules": LINEAR}, False),
        ({"target_modules": [*LINEAR, "embed_tokens"]}, True),
        ({"target_modules": LINEAR, "modules_to_save": ["lm_head"]}, True),
    ],
)
def test_an_adapter_on_one_end_of_a_tied_weight_is_refused(options: dict[str, Any], tied: bool) -> None:
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(TINY, dtype="float32"), LoraConfig(r=4, **options))
    assert trains_tied_weight(model) is tied
    engine = WithoutVLLM(None)
    engine.model = model
    if tied:
        with pytest.raises(ValueError, match="vLLM has one weight for embeddings and head"):
            engine._init_vllm()


class WithoutVLLM(PolicyEngine):
    """Without vLLM: what TRL's part returns or raises is given."""

    def __init__(self, result: Any, mode: str = "colocate") -> None:
        self.result, self.mode, self.checked, self.logprobs = result, mode, True, 0
        self.accelerator = SimpleNamespace(is_main_process=True, device=torch.device("cpu"))
        self._dist, self._staleness = SimpleNamespace(is_fsdp=False), 0
        self.vllm_client = SimpleNamespace(base_url="http://127.0.0.1:9", generate=None)
        self.vllm = SimpleNamespace(check_used=lambda: None, receiving=nullcontext)
        self.processing_class = None

    def check_transfer(self) -> None:
        pass

    def connect(self, monkeypatch: pytest.MonkeyPatch, *started: str) -> None:
        """Connect to a server whose process was started at these times, the last one for good."""
        times = chain(started, repeat(started[-1] if started else "now"))
        monkeypatch.setattr("grpo.generation.vllm.server.started_at", lambda url: next(times))
        monkeypatch.setattr("grpo.generation.vllm.server.can_be_asked", lambda url: False)
        monkeypatch.setattr(VLLMGeneration, "_init_vllm", lambda engine: None)
        monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
        self.server_base_url = self.vllm_client.base_url
        self._connect()


def given(self: WithoutVLLM, *args: Any, **options: Any) -> Any:
    if isinstance(self.result, Exception):
        raise self.result
    return self.result


@pytest.fixture
def _given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VLLMGeneration, "generate", given)
    monkeypatch.setattr(VLLMGeneration, "sync_weights", given)


class Communicator:
    """Stands for NCCL, which waits until it is aborted."""

    def __init__(self) -> None:
        self.aborted = threading.Event()
        self.destroy = self.aborted.set


def test_a_transfer_that_the_server_does_not_take_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = WithoutVLLM(None, mode="server")
    engine.vllm_client.communicator = Communicator()
    engine.connect(monkeypatch)
    monkeypatch.setattr(watched_session, "TRANSFER_SECONDS", 0)

    def blocked(self: WithoutVLLM) -> None:
        assert self.vllm_client.communicator.aborted.wait(30), "NCCL would wait for ever"
        raise requests.ConnectionError("the server is gone")

    monkeypatch.setattr(VLLMGeneration, "sync_weights", blocked)
    with pytest.raises(GenerationError, match="went away while it took the policy's weights"):
        engine.sync_weights()


def test_a_transfer_that_ends_in_time_keeps_its_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = WithoutVLLM(None, mode="server")
    engine.vllm_client.communicator = Communicator()
    engine.connect(monkeypatch)
    asked, answered = threading.Event(), threading.Event()

    def no_answer(url: str) -> bool:
        asked.set()
        answered.wait(10)
        return False

    monkeypatch.setattr(watched_session, "answers", no_answer)
    monkeypatch.setattr(watched_session, "PAUSE", 0.01)
    monkeypatch.setattr(watched_session, "FAILURES", 1)
    monkeypatch.setattr(VLLMGeneration, "sync_weights", lambda self: asked.wait(10))
    engine.sync_weights()
    answered.set()
    assert not engine.vllm_client.communicator.aborted.wait(0.5)


def test_a_server_pauses_while_it_gets_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, done = WithoutVLLM(None, mode="server"), list[str]()

    def post(url: str, **options: Any) -> SimpleNamespace:
        done.append(url.rpartition("/")[2])
        return SimpleNamespace(raise_for_status=lambda: None)

    def generate(prompts: list[list[int]], generation_kwargs: Any) -> str:
        engine.sync_weights()
        return "completions"

    engine.vllm_client.session = SimpleNamespace(post=post)
    engine.vllm_client.generate = generate
    engine.connect(monkeypatch)
    monkeypatch.setattr(VLLMGeneration, "sync_weights", lambda self: done.append("sent"))
    assert engine.vllm_client.generate(prompts=[[1]], generation_kwargs={"request_id": "a"}) == "completions"
    recomputed = "reset_prefix_cache?reset_running_requests=true"
    assert done == ["pause?mode=keep", "sent", recomputed, "resume"]
    done.clear()
    engine.sync_weights()
    assert done == ["sent"], "nothing runs"


def test_a_server_forgets_image_features_after_new_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, done = WithoutVLLM(None, mode="server"), list[str]()

    def post(url: str) -> SimpleNamespace:
        done.append(url.rpartition("/")[2])
        return SimpleNamespace(raise_for_status=lambda: None)

    engine.vllm_client.session = SimpleNamespace(post=post)
    engine.processing_class = SimpleNamespace(image_processor=None)
    engine.connect(monkeypatch)
    monkeypatch.setattr(VLLMGeneration, "sync_weights", lambda self: done.append("sent"))
    engine.sync_weights()
    assert done == ["sent", "reset_encoder_cache"]


def test_without_vllm_a_script_is_told_that_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(vllm_generation, "LLM", raising=False)
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda: False)
    monkeypatch.setattr("grpo.generation.vllm.engine.is_vllm_available", lambda: False)
    engine = WithoutVLLM(None)
    engine.model = torch.nn.Linear(1, 1)
    with pytest.raises(ImportError, match="vLLM is not available"):
        engine._init_vllm()


@pytest.mark.vllm
def test_a_sleeping_engines_memory_is_not_counted_as_the_policys(
    monkeypatch: pytest.MonkeyPatch, cuda_driver: CudaDriver
) -> None:
    cumem = pytest.importorskip("vllm.device_allocator.cumem")
    pool = SimpleNamespace(get_current_usage=lambda: 6 * GB)
    monkeypatch.setattr(cumem.CuMemAllocator, "get_instance", lambda: pool)
    engine = WithoutVLLM(None)
    engine.enable_sleep_mode, engine._llm_weights_sleeping = True, True
    cuda_driver.allocate(8 * GB)
    readings, budget = MemoryReadings(on_gpu=True), TokenBudget("auto", torch.device("cuda"))
    readings.asleep = budget.asleep = engine.asleep
    with readings.of("update"):
        budget.watch()
    with readings.of("generate"):
        pass
    assert budget.occupied == 2 * GB
    assert (readings.highest["memory/update_gb"], readings.highest["memory/generate_gb"]) == (2, 8)
    engine._llm_weights_sleeping = False
    assert engine.asleep() == 0


@pytest.mark.usefixtures("_given")
@pytest.mark.parametrize(
    ("result", "says"),
    [
        (([[1], [1]], [[5], []], [], None), "vLLM gave up 1 of 2 completions"),
        (([[1]], [[5]], [], None), "vLLM gave up 1 of 2 completions"),
        (RuntimeError("out of\nblocks"), "vLLM failed while it generated: RuntimeError: out of blocks"),
        (requests.exceptions.RetryError("too many 500"), "http://127.0.0.1:9 failed while it generated; its log says"),
        (requests.ConnectionError("refused"), "http://127.0.0.1:9 went away while it generated"),
    ],
)
def test_a_failed_generation_ends_with_its_reason_in_one_line(result: Any, says: str) -> None:
    with pytest.raises(GenerationError) as caught:
        WithoutVLLM(result).generate([[1], [1]], None, 1)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_a_model_that_comes_quantized_is_refused(mode: str) -> None:
    engine = WithoutVLLM(None, mode)
    quantization = BitsAndBytesConfig(load_in_4bit=True)
    engine.model = AutoModelForCausalLM.from_pretrained(TINY, quantization_config=quantization)
    with pytest.raises(ValueError, match="quantized policy: use generation=transformers"):
        engine._init_vllm()


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("merged", {"lora": "merged"}),
        ("server", {"mode": "server"}),
        ("uncorrected", {"corrected": False}),
        ("quantized", {}),
    ],
)
def test_only_whole_frozen_weights_are_quantized_by_vllm(kind: str, more: dict[str, Any]) -> None:
    model = policy("lora")
    model.is_quantized = kind == "quantized"
    options = {"mode": "colocate", "corrected": True, "quantization": "fp8", **more}
    with pytest.raises(ValueError, match=r"engine\.quantization=fp8: vLLM quantizes whole frozen weights beside"):
        PolicyEngine(model, None, None, **options)


@pytest.mark.usefixtures("_given")
def test_weights_that_vllm_does_not_take_end_with_the_reason() -> None:
    with pytest.raises(GenerationError, match="vLLM failed while it took the policy's weights: KeyError"):
        WithoutVLLM(KeyError("lm_head")).sync_weights()


@pytest.mark.usefixtures("_given")
def test_a_server_restarted_during_a_run_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = WithoutVLLM(([[1]], [[5]], [], None), mode="server")
    engine.connect(monkeypatch, "process_start_time_seconds 1", "process_start_time_seconds 1", "…seconds 2")
    engine.generate([[1]], None, 1)
    with pytest.raises(GenerationError, match="was started again in the middle of the run"):
        engine.generate([[1]], None, 1)


@pytest.mark.usefixtures("_given")
def test_answers_are_greedy_and_rollouts_keep_their_settings() -> None:
    engine = WithoutVLLM(([[1]], [[5]], [], None))
    own = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2}
    engine.__dict__.update(own, generation_kwargs={"seed": 1})
    used: dict[str, Any] = {}

    def noted(prompts: list, images: None, number: int) -> tuple:
        used.update(vars(engine))
        return engine.result

    engine.generate = noted  # type: ignore[method-assign]
    assert engine.complete([[1]]) == [[5]]
    assert (used["temperature"], used["top_p"], used["repetition_penalty"], used["generation_kwargs"]) == (0, 1, 1, {})
    assert {name: getattr(engine, name) for name in own} == own
    assert engine.generation_kwargs == {"seed": 1}


def test_an_engine_with_masks_answers_with_the_likeliest_token() -> None:
    """vLLM has them of samples alone, which need a temperature."""
    engine = WithoutVLLM(None)
    engine.masks = True
    engine.__dict__.update(temperature=0.7, top_p=0.9, top_k=99, min_p=None, repetition_penalty=1.2)
    engine.generation_kwargs = {"stop_token_ids": [4]}
    with engine.greedy():
        assert (engine.temperature, engine.top_k, engine.top_p) == (1, 1, 1)
        assert engine.generation_kwargs == {"stop_token_ids": [4], "seed": 0}
    assert (engine.temperature, engine.top_k, engine.top_p) == (0.7, 99, 0.9)


# With the real engine.

PROMPTS = [problem.question for problem in islice(problems("train"), 64)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> ExactGRPOTrainer:
    """A policy after three steps at a large learning rate, and its engine."""
    made = trainer(tmp_path_factory.mktemp("trained"))
    made.train()
    return made


@pytest.mark.vllm
def test_vllms_log_probabilities_are_the_policys_at_every_step(trained: ExactGRPOTrainer) -> None:
    differences = [row["sampling/sampling_logp_difference/max"] for row in trained.state.log_history if "loss" in row]
    assert len(differences) == 3
    assert max(differences) < 1e-4


@pytest.mark.vllm
@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_whose_engine_has_other_weights_stops(fault: str) -> None:
    found = check(fault, steps=15, peft_config=LORA)
    assert found["stopped_after_step"] is not None
    assert found["largest_difference"] > 10 * found["tolerance"]


@pytest.mark.vllm
def test_the_engine_is_checked_at_the_first_step_and_passes(trained: ExactGRPOTrainer) -> None:
    verdicts = [row.get("engine/is_policy") for row in trained.state.log_history if "loss" in row]
    assert verdicts == [1.0, None, None]


@pytest.mark.vllm
def test_vllm_answers_what_transformers_answers(trained: ExactGRPOTrainer) -> None:
    trained.vllm_generation.sync_weights()
    model = trained.model.eval()
    answers = partial(Completer(model, trained.processing_class, 16), PROMPTS)
    by_transformers = answers()
    assert answer(trained, PROMPTS) == by_transformers
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.3)
    assert answer(trained, PROMPTS) == by_transformers, "the engine has weights of its own"
    trained.vllm_generation.sync_weights()
    assert answer(trained, PROMPTS) == answers() != by_transformers


@pytest.mark.vllm
@pytest.mark.parametrize(
    "engine", [None, Engine("merged"), Engine("adapter"), Engine("adapter", share_weights=True)], ids=str
)
def test_training_an_adapter_changes_no_bit_of_its_base(tmp_path: Path, engine: Engine | None) -> None:
    """In a script that asks for nothing, it is merged, as by TRL."""
    made = trainer(tmp_path, LORA, engine=engine, max_steps=4)
    assert made.vllm_generation.sends_adapter == (engine is not None and engine.lora == "adapter")
    assert os.environ["MASTER_PORT"] not in ("29500", "23456", "12355", "12345"), "where two runs would meet"
    before = {name: w.clone() for name, w in made.model.named_parameters() if "lora_" not in name}
    made.train()
    now = dict(made.model.named_parameters())
    assert all(torch.equal(now[name], weight) for name, weight in before.items())
    history = [row for row in made.state.log_history if "loss" in row]
    assert max(row["sampling/sampling_logp_difference/max"] for row in history) < 1e-4
    assert any(row["grad_norm"] > 0 for row in history)


@pytest.mark.vllm
def test_an_engine_answers_with_the_newest_adapter_alone(tmp_path: Path) -> None:
    made = trainer(tmp_path, LORA, engine=Engine("adapter", share_weights=True))
    model = made.model.eval()
    said = []
    for _ in range(3):
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    weight.add_(0.02 * torch.randn_like(weight))
        made.vllm_generation.sync_weights()
        said.append(answer(made, PROMPTS))
        assert said[-1] == Completer(model, made.processing_class, 16)(PROMPTS)
    assert said[0] != said[1] != said[2]
    assert made.vllm_generation.llm.llm_engine.list_loras() == {3}


@pytest.mark.vllm
def test_an_engine_that_never_gets_the_adapter_stops_the_run() -> None:
    found = check("weights never sent", steps=15, peft_config=LORA, engine=Engine("adapter"))
    assert found["stopped_after_step"] is not None


class Write(TrainerCallback):
    """Write to a frozen weight after the first step."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 1:
            model.get_parameter("base_model.model.model.layers.2.mlp.up_proj.base_layer.weight").data[3, 5] += 1e-3


@pytest.mark.vllm
def test_a_write_to_a_weight_that_exists_once_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine computes with the same wrong weight, so log-probabilities would not show it."""
    monkeypatch.setattr(engine_check, "EVERY", 1)
    made = trainer(tmp_path, LORA, engine=Engine("adapter", share_weights=True))
    monkeypatch.setattr(made.vllm_generation, "check_transfer", lambda: None)  # which may find it first
    made.add_callback(Write())
    with pytest.raises(GenerationError, match=r"1 frozen weights .* written to, first model.layers.2.mlp.up"):
        made.train()
    assert made.state.global_step == 1


@pytest.mark.vllm
def test_a_full_cache_costs_time_and_no_completion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roomy = trainer(tmp_path / "roomy")
    cache = 4 * 2 * 128 * 4 * 32 * 8  # layers, keys and values, width, bytes, tokens of a block, blocks
    options = {"enforce_eager": True, "block_size": 32, "kv_cache_memory_bytes": cache}
    monkeypatch.setattr("grpo.generation.vllm.colocated.cpu_options", lambda share, weights: options)
    narrow = trainer(tmp_path / "narrow")
    blocks = narrow.vllm_generation.llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    assert blocks * 32 < 16 * 24, "not all of 16 rows at a time"
    assert answer(narrow, PROMPTS) == answer(roomy, PROMPTS)


class Crash(TrainerCallback):
    """Take the engine's weights away after a step."""

    def __init__(self, made: ExactGRPOTrainer, step: int) -> None:
        self.made, self.step = made, step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            executor = self.made.vllm_generation.llm.llm_engine.model_executor
            executor.driver_worker.model_runner.model = None


@pytest.mark.vllm
def test_a_crash_of_the_engine_keeps_the_completed_steps(tmp_path: Path) -> None:
    made = trainer(tmp_path, max_steps=4)
    made.add_callback(Crash(made, 2))
    with pytest.raises(GenerationError, match="vLLM failed while it took the policy's weights"):
        made.train()
    keep_steps(made)
    kept = newest_checkpoint(tmp_path)
    assert kept is not None
    assert kept.name == "checkpoint-2"
    again = trainer(tmp_path, max_steps=4)
    again.train(resume_from_checkpoint=str(kept))
    assert again.state.global_step == 4


@pytest.mark.vllm
def test_a_prompt_that_is_too_long_for_the_engine_is_one_line(trained: ExactGRPOTrainer) -> None:
    with pytest.raises(GenerationError, match="vLLM failed while it generated") as caught:
        trained.vllm_generation.generate([[5] * 200], None, 1)
    assert "\n" not in str(caught.value)
