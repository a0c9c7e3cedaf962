"""One copy of the frozen weights: the policy's are views of the engine's."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from grpo.config.schema import ROOT
from grpo.config.transport import SAME_LAYOUT
from grpo.generation.vllm.colocated import loadable
from grpo.generation.vllm.shared_weights import fingerprint, share
from grpo.model.policy import without_weights
from grpo.utils.errors import GenerationError

TINY = ROOT / "grpo" / "builtin" / "tiny"
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def adapted(composed: Any, name: Path | str = TINY) -> PeftModel:
    """The policy of a run without weights, with an adapter."""
    model = without_weights(composed(f"model.model_name_or_path={name}").model)
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))


class Packed(torch.nn.Module):
    """The built-in policy's weights as an engine packs them, with a padded embedding."""

    packed_modules_mapping = PACKED

    def __init__(self) -> None:
        super().__init__()
        self.whole = AutoModelForCausalLM.from_pretrained(TINY, dtype="float32")
        self.held = {}
        weights = dict(self.whole.named_parameters())
        for name, weight in weights.items():
            owner, _, kind = name.rpartition(".")
            above, _, module = owner.rpartition(".")
            whole = next((whole for whole, parts in PACKED.items() if module in parts), None)
            if whole is None:
                rows = torch.cat((weight.data, torch.zeros(9, weight.size(1)))) if "embed" in name else weight.data
                self.held[f"{owner}.base_layer.{kind}"] = torch.nn.Parameter(rows, requires_grad=False)
            elif module == PACKED[whole][0]:
                rows = torch.cat([weights[f"{above}.{part}.{kind}"].data for part in PACKED[whole]])
                self.held[f"{above}.{whole}.base_layer.{kind}"] = torch.nn.Parameter(rows, requires_grad=False)

    def named_parameters(self, *args: Any, **options: Any) -> Any:
        return iter(self.held.items())


def test_a_policy_without_weights_has_the_rest_and_no_memory(composed: Any) -> None:
    policy = without_weights(composed().model)
    whole = AutoModelForCausalLM.from_pretrained(TINY)
    assert {name: weight.shape for name, weight in policy.named_parameters()} == {
        name: weight.shape for name, weight in whole.named_parameters()
    }
    assert sum(weight.untyped_storage().nbytes() for weight in policy.parameters()) < 1000
    assert all(torch.equal(buffer, dict(whole.named_buffers())[name]) for name, buffer in policy.named_buffers())
    assert policy.generation_config.eos_token_id == whole.generation_config.eos_token_id
    assert policy.name_or_path == whole.name_or_path


def test_a_policy_uses_engine_weights_and_trains_its_adapter(composed: Any) -> None:
    policy, engine = adapted(composed), Packed()
    shared = share(policy, engine)
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        assert torch.equal(policy.eval()(ids).logits, engine.whole.eval()(ids).logits)
    storages = {weight.untyped_storage().data_ptr() for weight in engine.held.values()}
    assert {weight.untyped_storage().data_ptr() for weight in shared.values()} == storages
    policy.train()(ids, labels=ids).loss.backward()
    trained = {name for name, weight in policy.named_parameters() if weight.grad is not None}
    assert trained == {name for name, _ in policy.named_parameters() if "lora_" in name}


def test_writing_a_shared_weight_changes_its_fingerprint_alone(composed: Any) -> None:
    engine = Packed()
    shared = share(adapted(composed), engine)
    before = fingerprint(shared)
    assert fingerprint(shared) == before
    engine.held["model.layers.1.self_attn.qkv_proj.base_layer.weight"].data[-1, -1] += 1e-6
    changed = [name for name, one, two in zip(shared, before, fingerprint(shared), strict=True) if one != two]
    assert changed == ["model.layers.1.self_attn.v_proj.weight"]


def test_a_weight_in_another_layout_is_an_error(composed: Any) -> None:
    engine = Packed()
    name = "model.layers.0.mlp.down_proj.base_layer.weight"
    engine.held[name] = torch.nn.Parameter(engine.held[name].data.T.contiguous(), requires_grad=False)
    with pytest.raises(GenerationError, match=r"vLLM holds model\.layers\.0\.mlp\.down_proj\.weight in another layout"):
        share(adapted(composed), engine)


@pytest.mark.vllm
@pytest.mark.parametrize("family", SAME_LAYOUT)
def test_every_family_has_its_weights_in_the_engine_bit_for_bit(
    family: str, composed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # in this process
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    numbers = {"vocab_size": 90, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
    tokens = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    torch.manual_seed(0)
    whole = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **numbers, **heads, **tokens)).eval()
    whole.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(tmp_path)
    how: dict[str, Any] = {"enable_lora": True, "enforce_eager": True, "block_size": 32, "max_model_len": 64}
    with loadable():
        llm = LLM(str(tmp_path), dtype="float32", kv_cache_memory_bytes=2**26, **how)
    policy = adapted(composed, tmp_path).eval()
    share(policy, llm.llm_engine.model_executor.driver_worker.model_runner.model)
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        assert torch.equal(policy(ids).logits, whole(ids).logits)
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
