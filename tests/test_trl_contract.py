"""What we rely on in TRL and transformers: the methods that we override and the names that we touch."""

import ast
import inspect
import logging
import re
import warnings
from difflib import unified_diff
from pathlib import Path

import pytest
import transformers
from trl import GRPOTrainer
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer
from trl.trainer import utils as trl_utils
from trl.trainer.utils import RepeatSampler

from grpo.generation.vllm.engine import PolicyEngine
from grpo.trainer import ExactGRPOTrainer
from tests.stock_trl import make
from tests.trl_contract import FILE, attributes, from_library, overridden, relied_on

MULTIMODAL = (
    "pixel_values, image_grid_thw, num_images, pixel_attention_mask, spatial_shapes, num_tiles, image_sizes, "
    "token_type_ids, mm_token_type_ids, image_position_ids"
)
# The parameters of each method that we override, as TRL 1.16 and transformers 5.19 have them.
TRAINER = {
    "__init__": "self, model, reward_funcs, args, train_dataset, eval_dataset, processing_class, "
    "reward_processing_classes, callbacks, optimizers, quantization_config, peft_config, tools, rollout_func, "
    "environment_factory",
    "train": "self, resume_from_checkpoint, trial, ignore_keys_for_eval",
    "training_step": "self, model, inputs, num_items_in_batch",
    "log": "self, logs, start_time",
    "create_optimizer": "self, model",
    "compute_loss": "self, model, inputs, return_outputs, num_items_in_batch",
    "_clip_grad_norm": "self, model",
    "_get_grad_norm": "self, model, grad_norm",
    "_get_train_sampler": "self, dataset",
    "_run_epoch": "self, model, epoch, train_dataloader, steps_in_epoch, num_update_steps_per_epoch, trial, "
    "ignore_keys_for_eval, start_time, resume_from_checkpoint, epochs_trained, steps_trained_in_current_epoch",
    "_save": "self, output_dir, state_dict",
    "_save_checkpoint": "self, model, trial",
    "_load_optimizer_and_scheduler": "self, checkpoint",
    "_generate_and_score_completions": "self, inputs",
    "_tokenize_prompts": "self, prompts",
    "_get_tool_suffix_ids": "self, tool_messages",
    "_load_from_checkpoint": "self, resume_from_checkpoint, model",
    "_generate_single_turn": "self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images",
    "_get_per_token_logps_and_entropies": "self, model, input_ids, attention_mask, logits_to_keep, batch_size, "
    f"compute_entropy, compute_aux_loss, {MULTIMODAL}",
}
ENGINE = {
    "__init__": (
        "self, model, accelerator, processing_class, mode, structured_outputs_regex, server_base_url, server_host, "
        "server_port, server_timeout, group_port, tensor_parallel_size, gpu_memory_utilization, max_model_length, "
        "max_num_seqs, enable_sleep_mode, model_impl, trust_remote_code, repetition_penalty, temperature, top_p, "
        "top_k, min_p, max_completion_length, logprobs, generation_kwargs"
    ),
    "_init_vllm": "self",
    "_iter_named_params": "self",
    "sync_weights": "self",
    "generate": "self, prompts, images, num_generations, profiler",
}


@pytest.mark.parametrize(
    ("ours", "theirs", "known"), [(ExactGRPOTrainer, GRPOTrainer, TRAINER), (PolicyEngine, VLLMGeneration, ENGINE)]
)
def test_every_overridden_method_still_takes_the_same_parameters(ours, theirs, known):
    assert overridden(ours, theirs) == known.keys()
    for name, parameters in known.items():
        assert ", ".join(inspect.signature(getattr(theirs, name)).parameters) == parameters, name


def test_the_docstring_lists_the_overridden_methods() -> None:
    listed = str(ExactGRPOTrainer.__doc__).partition("unnecessary:")[2].partition("Losses that")[0]
    names = re.findall(r"`(_?[a-z_]+)`", listed)
    assert sorted(names) == sorted(TRAINER.keys() - {"__init__"})
    assert len(names) <= 20


def test_every_trainer_attribute_that_we_touch_is_in_stock_trl(tmp_path: Path):
    used = from_library(ExactGRPOTrainer, GRPOTrainer)
    assert {"_step", "_buffered_inputs", "_metrics", "_tokenizer", "_entropy_window_stats"} <= used
    trainer = make(GRPOTrainer, tmp_path)
    trainer.current_gradient_accumulation_steps = 1  # transformers sets it in the training loop
    # some only with vLLM, or in the training loop
    assigned = attributes(GRPOTrainer, written=True) | attributes(transformers.Trainer, written=True)
    assert sorted(name for name in used if not (hasattr(trainer, name) or name in assigned)) == []


def test_private_names_of_a_trainer_are_in_one_file() -> None:
    """Elsewhere its functions are called; `exact.py` overrides methods, and `placement.py` has accelerate's."""
    known = {"aten", "self", "cls", "utils", "groups[-1]"}  # operators of PyTorch, a module, a named tuple
    for package in ("trainer", "evaluation", "extras/preflight", "run"):
        for file in (FILE.parents[1] / "grpo" / package).rglob("*.py"):
            nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)]
            private = [node for node in nodes if node.attr.startswith("_") and not node.attr.startswith("__")]
            names = [ast.unparse(node) for node in private if ast.unparse(node.value) not in known]
            names = [name for name in names if not name.startswith(("super()", "os._exit"))]
            assert not names or file.name in ("trl.py", "placement.py"), (file, names)


def test_every_engine_attribute_that_we_touch_is_in_stock_trl():
    made = {"_server_started", "_requests", "_checked_adapter"}
    assigned = {name for kind in VLLMGeneration.__mro__[:-1] for name in attributes(kind, written=True)}
    used = from_library(PolicyEngine, VLLMGeneration) - made
    assert {"_dist", "_weight_metadata", "vllm_client", "gpu_memory_utilization"} <= used
    assert sorted(name for name in used if name not in assigned and not hasattr(VLLMGeneration, name)) == []


def test_replaced_and_imported_names_are_still_where_they_were():
    assert grpo_trainer.VLLMGeneration is VLLMGeneration
    assert "rotate_checkpoints(" in inspect.getsource(transformers.Trainer._save_checkpoint), (
        "sealed before it is called"
    )
    assert "set_epoch" not in vars(RepeatSampler), "ours is no longer needed"
    assert "LLM(" in inspect.getsource(vllm_generation), "the engine is made by this name"
    batch = {"advantages": [1.0, 2.0], "num_items_in_batch": None}
    assert trl_utils.unsplit_pixel_values_by_grid(trl_utils.split_pixel_values_by_grid(batch)) == batch


def test_the_source_that_we_rely_on_is_the_one_we_have_read():
    """docs/architecture.md says what to do when it is not: a new version of TRL."""
    recorded = FILE.read_text().splitlines()
    changed = "\n".join(unified_diff(recorded, relied_on(), "read", "installed", lineterm="", n=0))
    assert not changed, f"{changed}\npython -m tests.trl_contract > {FILE.name} once all of it has been looked at"


def test_deprecated_calls_are_errors() -> None:
    with pytest.raises(DeprecationWarning):
        warnings.warn("`old` is deprecated", DeprecationWarning, stacklevel=1)
    with pytest.raises(DeprecationWarning):
        logging.getLogger("transformers.models").warning("`torch_dtype` is deprecated")
