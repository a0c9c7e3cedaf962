"""Adapters that act on each token alone, so that sequences may be computed together."""

from typing import Any

from accelerate.utils import is_peft_model
from peft import PeftType

BY_TOKEN = {
    *(PeftType.LORA, PeftType.ADALORA, PeftType.LOHA, PeftType.LOKR, PeftType.IA3, PeftType.OFT, PeftType.BOFT),
    *(PeftType.HRA, PeftType.VERA, PeftType.VBLORA, PeftType.FOURIERFT, PeftType.LN_TUNING, PeftType.RANDLORA),
    *(PeftType.MISS, PeftType.SHIRA, PeftType.C3A, PeftType.TRAINABLE_TOKENS, PeftType.ROAD, PeftType.WAVEFT),
}


def why_not_by_token(model: Any) -> str | None:
    """Return why the active adapter may compute a token by others of its sequence, or None."""
    if not is_peft_model(model):
        return None
    for config in (model.peft_config[name] for name in model.active_adapters):
        if config.peft_type not in BY_TOKEN or getattr(config, "alora_invocation_tokens", None):
            return f"its adapter ({config.peft_type.value.lower()}) may not act on each token alone"
    return None
