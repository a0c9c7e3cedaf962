"""Decoder layers by `torch.compile`: fewer and larger kernels, for all lengths at once.

Layers of a class share one compiled function, in which lengths are variables. Whether a layer compiles is found by
trying: without a break of its graph, and with the output and the gradient of the layer as it is. Where a layer does not
(it keeps a state, deals tokens out to experts, or has tiles), its parts are tried, and what does not compile stays as
it is.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo.trainer.batch import as_sequences
from grpo.trainer.shared_prompts.attention import shared_attention
from grpo.trainer.shared_prompts.states import state_layers
from grpo.trainer.shared_prompts.trial import SharedPrompts, shared_scores, text_rows, undisturbed
from grpo.utils.attention import policy_of, relative_rounding
from grpo.utils.errors import DoesNotFit, described
from grpo.utils.modes import in_mode, oldest_graph_first
from grpo.utils.oom import is_out_of_memory, tried
from grpo.utils.patching import replaced

log = logging.getLogger(__name__)
BACKEND = "inductor"
"""PyTorch's compiler."""
NOISE = 16
"""Times the rounding of the policy by which a compiled layer may differ from it."""
Forward = Callable[..., Any]
Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a layer."""


class CompiledLayers:
    """Computes with compiled decoder layers, which it tries before the first micro-batch.

    Args:
        shared_prompts: tells how the policy computes most of its micro-batches.
        autocast: of accelerate.
    """

    def __init__(self, shared_prompts: SharedPrompts, autocast: Callable[[], Any]) -> None:
        self.shared_prompts, self.autocast = shared_prompts, autocast
        self.forwards: dict[torch.nn.Module, Forward] | None = None
        """The modules that are compiled, with their functions; None before the trial."""
        self._compiled: dict[Forward, Forward] = {}

    @contextmanager
    def on(self, model: Any) -> Iterator[None]:
        """While inside, the compiled layers of a policy compute; the backward pass belongs inside, too."""
        with ExitStack() as stack:
            stack.enter_context(oldest_graph_first())
            if self.forwards is None:
                self.forwards = self._try(model)
            for module, forward in self.forwards.items():
                stack.enter_context(replaced(module, "forward", MethodType(forward, module)))
            yield

    def gives_up(self, error: RuntimeError) -> bool:
        """Return whether compiled layers may be what failed; from then on the layers compute as they are."""
        if not self.forwards or is_out_of_memory(error) or isinstance(error, DoesNotFit):
            return False
        self.forwards = {}
        log.warning("compiled layers failed, and compute as they are from now on: %s", described(error))
        return True

    def _try(self, model: Any) -> dict[torch.nn.Module, Forward]:
        started = time.perf_counter()
        layers = [of for of in policy_of(model).get_decoder().modules() if isinstance(of, GradientCheckpointingLayer)]
        kinds = {repr(layer): layer for layer in reversed(layers)}  # a text that has the shapes of all weights
        log.warning("compiling the decoder layers (torch.compile), about a minute; less where PyTorch has them cached")
        self.shared_prompts.decide()
        shares = self.shared_prompts.results["text"]
        parts: dict[str, list[str]] = {}
        sharing = shared_attention(model) if shares else nullcontext()
        with torch.random.fork_rng(), in_mode(model.modules(), training=True), self.autocast(), sharing:
            calls = calls_of(model, list(kinds.values()), self.shared_prompts)
            rounding = NOISE * relative_rounding(model)
            for kind, layer in kinds.items():
                reason, parts[kind] = why_not(layer, calls, rounding), [""]
                if reason:
                    names = [name for name, part in layer.named_children() if not why_not(part, calls, rounding)]
                    parts[kind] = names
                    only = f"only its {', '.join(names)}" if names else "not compiled"
                    log.warning("%s: %s, as %s", type(layer).__name__, only, reason)
        log.warning("compiled the decoder layers in %.0f s", time.perf_counter() - started)
        modules = [layer.get_submodule(name) for layer in layers for name in parts[repr(layer)]]
        return {module: self._compile(module) for module in modules}

    def _compile(self, module: Any) -> Forward:
        """Return a function of a module and its arguments, one for all modules of a class."""
        forward = type(module).forward
        if forward not in self._compiled:
            self._compiled[forward] = partial(alike, torch.compile(forward, dynamic=True, backend=BACKEND))
        return self._compiled[forward]


def alike(forward: Forward, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a compiled function of a module so that a first layer after frozen embeddings is not compiled by itself."""
    hidden, wanted = args[0] if args else kwargs["hidden_states"], torch.is_grad_enabled()
    if hidden.requires_grad != wanted:
        hidden = hidden.detach().requires_grad_(wanted)
        args, kwargs = ((hidden, *args[1:]), kwargs) if args else ((), kwargs | {"hidden_states": hidden})
    return forward(module, *args, **kwargs)


def why_not(module: Any, calls: dict[torch.nn.Module, Call], rounding: float) -> str | None:
    """Return why a module does not compile, or not to the same results; None if it does.

    Args:
        calls: see `calls_of`.
        rounding: largest relative difference of a result that is the same.
    """
    if state_layers(module):
        return "it keeps a state"
    if has_other_forward(module):  # nor is a layer of tiles: these are views, and the place of a view is in its graph
        return "a part of it is computed in tiles, or has hooks"
    if module not in calls:
        return "it is not called"
    forward, call = type(module).forward, calls[module]
    plain, again = (results(forward, module, call) for _ in range(2))  # dropout makes them differ
    whole = torch.compile(forward, dynamic=True, backend=BACKEND, fullgraph=True)
    compiled, reason = tried(lambda: results(whole, module, call))
    for own, stock, other in zip(compiled or (), plain, again, strict=compiled is not None):
        if not distance(own, stock) <= rounding * float(stock.norm()) + 2 * distance(other, stock):
            return f"its results differ by {distance(own, stock) / float(stock.norm()):.1e}"
    return reason and reason.split(" Explanation:")[0][:120]  # of PyTorch's, a paragraph


def has_other_forward(module: torch.nn.Module) -> bool:
    """Return whether a part of a module is computed by another function than its class's."""
    return any(isinstance(vars(part).get("forward"), MethodType) for part in module.modules())


def calls_of(model: Any, layers: list[Any], shared_prompts: SharedPrompts) -> dict[torch.nn.Module, Call]:
    """Return the arguments of some layers of a policy and of their parts, for a few tokens."""
    calls: dict[torch.nn.Module, Call] = {}

    def note(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.setdefault(module, (args, kwargs))

    modules = [module for layer in layers for module in (layer, *layer.children())]
    handles = [module.register_forward_pre_hook(note, with_kwargs=True) for module in modules]
    rows = text_rows(model, policy_of(model).device)
    try:
        if shared_prompts.results["text"]:
            shared_scores(model, rows)
        else:
            with undisturbed(model):
                shared_prompts.plain(model, *as_sequences(rows))
    finally:
        for handle in handles:
            handle.remove()
    return calls


def results(forward: Forward, module: torch.nn.Module, call: Call) -> list[torch.Tensor]:
    """Return the output of a module, and the gradients of its input and of its trainable weights."""
    args, kwargs = call
    hidden = (args[0] if args else kwargs["hidden_states"]).detach().clone().requires_grad_()
    args, kwargs = ((hidden, *args[1:]), kwargs) if args else ((), kwargs | {"hidden_states": hidden})
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    with torch.enable_grad():
        output = forward(module, *args, **kwargs)
        output = output[0] if isinstance(output, tuple) else output
        factors = torch.arange(output.numel(), device=output.device).view_as(output) % 7 - 3
        gradients = torch.autograd.grad((output.float() * factors).sum(), [hidden, *weights], allow_unused=True)
    return [output.detach(), *(gradient for gradient in gradients if gradient is not None)]


def distance(tensor: torch.Tensor, other: torch.Tensor) -> float:
    """Return the norm of a difference."""
    return float((tensor.float() - other.float()).norm())
