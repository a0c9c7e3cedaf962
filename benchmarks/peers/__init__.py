"""The same update by stock TRL, this trainer, verl and ms-swift: `python -m benchmarks.peers`."""
