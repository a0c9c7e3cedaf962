"""The choices of `+gpu=` but `auto`: the rows of the table, and the files of `conf/gpu`."""

from grpo.config.gpus import PROFILES, table

NAMES = sorted({*table(), *(path.stem for path in PROFILES.glob("*.yaml"))} - {"auto"})
