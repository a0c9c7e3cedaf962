"""vLLM keeps the cache of each engine of a process, 0.5 GiB, for good: a hundred tests would fill the memory."""

from collections.abc import Iterator
from typing import Any

import pytest

from grpo.generation.vllm.engine import PolicyEngine
from grpo.utils.patching import replaced


def free_caches(engine: PolicyEngine) -> None:
    """Free the cache of an engine that is not needed any more."""
    runner = engine.vllm.runner
    runner.kv_caches.clear()
    for layer in runner.compilation_config.static_forward_context.values():
        layer.kv_cache = None


@pytest.fixture(autouse=True)
def caches_are_freed() -> Iterator[None]:
    """Free the caches of the engines that a test has made, after it."""
    made: list[PolicyEngine] = []
    init = PolicyEngine.__init__

    def noted(self: PolicyEngine, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        made.append(self)

    with replaced(PolicyEngine, "__init__", noted):
        yield
    for engine in made:
        if hasattr(engine, "llm"):
            free_caches(engine)
