"""Libraries that take seconds to import; `grpo.extras.testing.commands` forks processes that have them already."""

import gc
import os

os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as grpo.train sets it where processes meet; read when torch loads

import altair  # noqa: F401
import bitsandbytes  # noqa: F401
import datasets  # noqa: F401
import hydra  # noqa: F401
import matplotlib.figure  # noqa: F401
import pandas  # noqa: F401
import peft  # noqa: F401
import torch  # noqa: F401
import transformers.trainer  # noqa: F401
import trl.trainer.grpo_trainer  # noqa: F401

gc.freeze()  # what is here for good costs no garbage collection
