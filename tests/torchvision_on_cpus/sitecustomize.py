"""Lets torchvision be imported beside a CPU build of torch, in every Python process that has this folder in PYTHONPATH.

Qwen's processors and vLLM's models for images need torchvision, and its build for GPUs fails there for two operators
that neither calls. `make extras` installs it into a folder of its own, `.venv/torchvision`, so that nothing else finds
it.
"""

import torch

if torch.version.cuda is None:
    operators = torch.library.Library("torchvision", "DEF")
    operators.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    operators.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
