"""Plan and measured memory of updates with random weights on the GPU of this machine, for `python -m grpo.measure`."""
