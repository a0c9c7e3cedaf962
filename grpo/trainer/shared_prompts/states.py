"""Layers with a state and shared prompts: gated DeltaNet, Mamba, short convolutions, as transformers computes them.

Such a layer keeps no keys of earlier tokens but a state after the last one, in a cache that it is given. Here it
computes the tokens of a prompt once, and each completion begins with a copy of the prompt's state. The states are part
of the graph, so that the gradient of all completions flows through the prompt.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import Cache, LinearAttentionLayer

from grpo.trainer.shared_prompts.layout import Group
from grpo.utils.patching import replaced

CACHES = ("cache_params", "past_key_values")
"""Names of the argument in which layers take a cache."""
PADDED = 1.25
"""Completions are computed together up to this ratio of the tokens of the longest and the shortest."""


class States(LinearAttentionLayer):
    """The states of a layer after some tokens of sequences, with their graph; transformers' are copies without it."""

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """Keep the last inputs of a convolution; return all inputs, (sequences, channels, tokens), those before too."""
        if self.has_previous_state[state_idx]:
            conv_states = torch.cat((self.conv_states[state_idx], conv_states), -1)
        else:
            size = conv_kernel_size or conv_states.size(-1)
            conv_states = pad(conv_states, (max(0, size - conv_states.size(-1)), 0))
            self.conv_kernel_size[state_idx], self.has_previous_state[state_idx] = size, True
        self.conv_states[state_idx] = conv_states[..., -self.conv_kernel_size[state_idx] :]
        return conv_states

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """Keep the state after the last token, (sequences, ...)."""
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states


def continued(prompts: Sequence[tuple[States, int]]) -> States:
    """Return the states of completions that continue prompts, each the sequence with this number of these states."""
    states = States(prompts[0][0].number_of_states)
    first = prompts[0][0]
    states.has_previous_state, states.conv_kernel_size = dict(first.has_previous_state), dict(first.conv_kernel_size)
    for kind in ("conv_states", "recurrent_states"):
        for number, state in getattr(first, kind).items():
            if state is not None:
                getattr(states, kind)[number] = torch.stack([getattr(of, kind)[number][row] for of, row in prompts])
    return states


class StateLayer:
    """Stands where a layer has its `forward`, and computes the groups of a sequence, if there are any.

    Args:
        layer: keeps a state.
        groups_now: returns the groups of the sequence that a policy computes, and where layers that know them go; None
            where there are none, or where a layer is computed again in a backward pass: then they are those of before.
    """

    def __init__(self, layer: Any, groups_now: Callable[[], tuple[Sequence[Group], list[Any] | None] | None]) -> None:
        self.layer, self.forward, self.groups_now = layer, layer.forward, groups_now
        self.parameters = inspect.signature(layer.forward)
        self.cache = next(name for name in CACHES if name in self.parameters.parameters)
        self.groups: Sequence[Group] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the output of the layer, (1, T, size)."""
        if now := self.groups_now():
            self.groups = now[0]
            if now[1] is not None:
                now[1].append(self.layer)
        if not self.groups:
            return self.forward(*args, **kwargs)
        bound = self.parameters.bind(*args, **kwargs)
        hidden = bound.arguments.pop("hidden_states")
        if hidden.size(1) != self.groups[-1].end:
            raise ValueError(f"{hidden.size(1)} tokens of {self.groups[-1].end}")
        outputs, states = dict[int, torch.Tensor](), dict[int, tuple[States, int]]()
        prompts = [(group.start, group.prompt) for group in self.groups if group.prompt]
        for length in dict.fromkeys(length for _, length in prompts):
            starts = [start for start, of in prompts if of == length]
            output, after = self.compute(bound, hidden, [(start, length) for start in starts], None)
            outputs |= zip(starts, output, strict=True)
            states |= {start: (after, row) for row, start in enumerate(starts)}
        for completions in together(self.groups):
            begun = [states[of] for _, _, of in completions if of in states]
            state = continued(begun) if begun else None
            output, _ = self.compute(bound, hidden, [(start, length) for start, length, _ in completions], state)
            outputs |= {start: row for (start, _, _), row in zip(completions, output, strict=True)}
        return torch.cat([outputs[start] for start in sorted(outputs)])[None]

    def compute(
        self,
        bound: inspect.BoundArguments,
        hidden: torch.Tensor,
        parts: Sequence[tuple[int, int]],
        begun: States | None,
    ) -> tuple[list[torch.Tensor], States]:
        """Return the outputs of parts of a sequence, each (tokens, size), and their states, after states begun."""
        states = begun or States()
        rows = pad_sequence([hidden[0, start : start + length] for start, length in parts], batch_first=True)
        if begun and rows.size(1) == 1:  # a single token would change the states in place
            rows = pad(rows, (0, 0, 0, 1))
        arguments = bound.arguments | {"hidden_states": rows, "attention_mask": None}
        arguments[self.cache] = Cache(layers=[states] * (self.layer.layer_idx + 1))
        keywords = arguments.pop("kwargs", {})
        output = self.forward(**arguments, **keywords)
        return [row[:length] for row, (_, length) in zip(output, parts, strict=True)], states


def together(groups: Sequence[Group]) -> Iterator[list[tuple[int, int, int]]]:
    """Yield completions that are computed together: their first tokens, numbers of tokens and first tokens of groups.

    Completions without tokens of a prompt before them have no state to begin with, and are apart.
    """
    completions = [
        (group.start + group.prompt + before, length, group.start, group.prompt > 0)
        for group in groups
        for before, length in zip(accumulate((0, *group.completions)), group.completions, strict=False)
    ]
    for has_state in (True, False):
        batch: list[tuple[int, int, int]] = []
        for start, length, group, has in sorted(completions, key=lambda completion: -completion[1]):
            if has != has_state or not length:
                continue
            if batch and length * PADDED < batch[0][1]:
                yield batch
                batch = []
            batch.append((start, length, group))
        if batch:
            yield batch


@functools.cache
def keeps_state(kind: Any) -> bool:
    """Return whether a class of transformers is a layer that keeps a state in a cache which it takes."""
    if not kind.__module__.startswith("transformers.") or "forward" not in vars(kind):
        return False
    names = inspect.signature(kind.forward).parameters.keys()
    takes = {"hidden_states", "attention_mask"} <= names and not names.isdisjoint(CACHES)
    return takes and "update_conv_state(" in inspect.getsource(kind)


def state_layers(model: torch.nn.Module) -> list[Any]:
    """Return the layers of a model that keep a state."""
    modules: list[Any] = list(model.modules())
    return [module for module in modules if keeps_state(module.__class__)]


@contextmanager
def shared_states(model: Any, groups_now: Callable[[], Any]) -> Iterator[None]:
    """While inside, layers of a model that keep a state know the groups of the sequence; see `StateLayer`."""
    with ExitStack() as stack:
        for layer in state_layers(model):
            if not isinstance(layer.forward, StateLayer):
                stack.enter_context(replaced(layer, "forward", StateLayer(layer, groups_now)))
        yield
