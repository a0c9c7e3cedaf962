"""Private names of the libraries that we call or replace, but for those of TRL's classes (`trl_contract.py`).

`python -m tests.library_contract` prints a line for each, with a digest of its source, as `tests/library_contract.txt`
has them. `python -m tests.library_contract FOLDER` prints how these sources, and those of TRL, differ from the ones of
other versions, which have been installed into a folder: `pip install --no-deps --target FOLDER trl==1.16.0`.
"""

import ast
import inspect
import sys
from collections.abc import Iterator
from difflib import unified_diff
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from grpo.utils.patching import PATCHES
from tests.trl_contract import FILES, PAIRS, digest, from_library, overridden

FILE = Path(__file__).with_suffix(".txt")
GENERATE = "transformers.generation.utils:GenerationMixin"
AGENT = "torch.distributed.elastic.agent.server.local_elastic_agent:LocalElasticAgent"
CALLED = {
    "_prefill": f"{GENERATE}._prefill",
    "_update_model_kwargs_for_generation": f"{GENERATE}._update_model_kwargs_for_generation",
    "_supports_default_dynamic_cache": f"{GENERATE}._supports_default_dynamic_cache",
    "_optimize_model_for_decode": f"{GENERATE}._optimize_model_for_decode",
    "_has_unfinished_sequences": f"{GENERATE}._has_unfinished_sequences",
    "_set_sync_gradients": "accelerate.state:GradientState._set_sync_gradients",
    "_shutdown": f"{AGENT}._shutdown",
    "_shutdown_timeout": f"{AGENT}.__init__",
    "_remaining_restarts": "torch.distributed.elastic.agent.server.api:SimpleElasticAgent.__init__",
    "_state_holder": "torch.distributed.elastic.rendezvous.dynamic_rendezvous:DynamicRendezvousHandler.__init__",
    "_check_lora_target_modules_mamba": "peft.tuners.tuners_utils:_check_lora_target_modules_mamba",
    "_adapter_manager": "vllm.lora.worker_manager:WorkerLoRAManager.create_lora_manager",
    "_last_mapping": "vllm.lora.model_manager:LoRAModelManager.set_adapter_mapping",
}
"""Private names that we call or read, each with the function that it is, or that sets it."""
WITHOUT_SOURCE = {
    "_cdata": "a storage of PyTorch's",
    "_parameters": "of PyTorch's modules",
    "_no_split_modules": "of transformers' models",
    "_is_fsdp_managed_module": "likewise",
    "_name_or_path": "of transformers' configurations",
    "_get_node": "OmegaConf's",
    "_content": "likewise",
    "_target_": "Hydra's key",
    "_exit": "of Python's os",
    "_replace": "of Python's named tuples",
    "_state": "of an environment that we have made",
    "_scaled_dot_product_efficient_attention": "an operator of PyTorch",
    "_scaled_dot_product_flash_attention_for_cpu": "likewise",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "likewise",
    "_flash_attention_forward": "likewise",
    "_flash_attention_backward": "likewise",
    "_C": "PyTorch's module in C++",
    "_dynamo": "of that: its compiler",
    "_set_lru_cache": "likewise, which of several graphs is tried first",
}
"""Private names that are data or operators; extras are not searched."""


def of_others(tree: ast.Module) -> set[str]:
    """Private names of a file of ours in `x._name`, where neither `self` nor a name of the file has it."""
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    private = [node for node in attributes if node.attr.startswith("_") and not node.attr.startswith("__")]
    ours = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    ours |= {node.attr for node in private if ast.unparse(node.value) in ("self", "cls")}
    return {node.attr for node in private if not ast.unparse(node.value).startswith("super()")} - ours


def used() -> dict[str, set[str]]:
    """The files of ours, by the private names of others in them, without extras and the one file for trainers."""
    names: dict[str, set[str]] = {}
    for file in FILES:
        if "extras" not in file.parts and file.name != "trl.py":
            for name in of_others(ast.parse(file.read_text())):
                names.setdefault(name, set()).add(file.name)
    return names


def library_of(name: str) -> str:
    return name.partition(":")[0].partition(".")[0]


def relied_on() -> Iterator[tuple[str, str]]:
    """Each name whose library is installed, with the source."""
    for name in sorted({*CALLED.values(), *PATCHES}):
        library = "vllm" if "vllm" in name else library_of(name)  # of TRL's modules some import it
        if library in sys.stdlib_module_names or find_spec(library) is None:
            continue
        value = resolve_name(name)
        value = value.fget if isinstance(value, property) else value
        if inspect.isroutine(value) or inspect.isclass(value):
            yield f"{value.__module__}:{value.__qualname__}", inspect.getsource(value)


def lines() -> list[str]:
    """All lines."""
    return sorted({f"{name} {digest(source)}" for name, source in relied_on()})


def of_trl() -> Iterator[tuple[str, str]]:
    """Each method of TRL's classes that we override, call or reach, with the source."""
    for ours, theirs in PAIRS:
        for name in sorted(overridden(ours, theirs) | from_library(ours, theirs)):
            kind = next((kind for kind in theirs.__mro__ if name in vars(kind)), None)
            if kind and kind.__module__.startswith("trl.") and inspect.isroutine(vars(kind)[name]):
                yield f"{kind.__module__}:{kind.__name__}.{name}", inspect.getsource(vars(kind)[name])


def source_in(folder: Path, name: str) -> str:
    """The source of `module:name` in a folder with installed libraries; nothing if it is not there."""
    module, _, path = name.partition(":")
    place = folder.joinpath(*module.split("."))
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    text = file.read_text() if file.is_file() else ""
    node: Any = ast.parse(text)
    for part in path.split("."):
        named = (inner for inner in getattr(node, "body", ()) if getattr(inner, "name", None) == part)
        node = next(named, None)
    begin = min(part.lineno for part in (node, *node.decorator_list)) if node else 1
    return "\n".join(text.splitlines()[begin - 1 : node.end_lineno if node else 0])


def differences(folder: Path) -> Iterator[str]:
    """How the installed sources differ from those in a folder, of the libraries that are in it."""
    for name, source in [*relied_on(), *of_trl()]:
        if (folder / library_of(name)).is_dir():
            before = inspect.cleandoc(source_in(folder, name)).splitlines()
            yield from unified_diff(before, inspect.cleandoc(source).splitlines(), name, "installed", lineterm="", n=2)


if __name__ == "__main__":
    print("\n".join(differences(Path(sys.argv[1])) if sys.argv[1:] else lines()))
