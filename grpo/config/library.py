"""Names, types and defaults of the libraries' own options, read from the source text of the installed libraries.

Composition has to be quick, and importing `trl.GRPOConfig` takes seconds; the source text is never out of date.
"""

import ast
import functools
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from grpo.utils.errors import ConfigError

GRPO_CONFIG = (
    ("transformers", "training_args.py", "TrainingArguments"),
    ("trl", "trainer/base_config.py", "_BaseConfig"),
    ("trl", "trainer/grpo_config.py", "GRPOConfig"),
)

LORA_CONFIG = (
    ("peft", "config.py", "PeftConfigMixin"),
    ("peft", "config.py", "PeftConfig"),
    ("peft", "tuners/lora/config.py", "LoraConfig"),
)


@functools.cache
def library_fields(classes: tuple[tuple[str, str, str], ...]) -> dict[str, tuple[Any, Any]]:
    """Return `{name: (type, default)}` of dataclass fields, read from source without importing the libraries.

    Args:
        classes: triples of package, file in the package and class name; a later class overrides an earlier one.
    """
    fields = {}
    for package, file, name in classes:
        spec = find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ConfigError(f"the package {package} is not installed; run `make install`")
        tree = ast.parse((Path(spec.submodule_search_locations[0]) / file).read_text())
        body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
        for node in body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id[0] != "_":
                fields[node.target.id] = (_type(ast.unparse(node.annotation)), _default(node.value))
    return fields


@functools.cache
def optimizer_names() -> tuple[str, ...]:
    """Return the names that `train.optim` can have, read from the source of transformers' `OptimizerNames`."""
    spec = find_spec("transformers")
    assert spec, "library_fields has looked for it"
    tree = ast.parse((Path(str(spec.origin)).parent / "training_args.py").read_text())
    names = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "OptimizerNames")
    return tuple(ast.literal_eval(node.value) for node in names.body if isinstance(node, ast.Assign))


def _type(annotation: str) -> Any:
    optional = annotation.endswith(" | None")
    simple = {"int": int, "float": float, "bool": bool}.get(annotation.removesuffix(" | None"))
    if simple is None:
        return Any
    return simple | None if optional else simple


def _default(value: ast.expr | None) -> Any:
    """Return a literal default, None for a computed default, `MISSING` without a default."""
    if isinstance(value, ast.Call):
        value = next((word.value for word in value.keywords if word.arg in ("default", "default_factory")), None)
    if value is None:
        return MISSING
    try:
        return ast.literal_eval(value)
    except ValueError:
        return None


def package_folder(name: str) -> str:
    """Return the folder of an installed package, without importing it."""
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        distribution = name.replace("_", "-")
        raise ConfigError(f"comes with {distribution}: make extras")
    return spec.submodule_search_locations[0]


DEFAULT_OPTIMIZER = "adamw_torch_fused"


BUILDERS = {
    **{".jsonl": "json", ".json": "json", ".ndjson": "json"},
    **{".csv": "csv", ".tsv": "csv", ".parquet": "parquet"},
}
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
"""Suffixes behind those of `BUILDERS`."""


def suffix_of(file: object) -> str:
    """Return the suffix of a file in small letters, without that of its compression."""
    path = Path(str(file).lower())
    return (path.with_suffix("") if path.suffix in COMPRESSED else path).suffix
