"""Planned against measured memory by GPU, from the files of `python -m grpo.measure`: `python -m benchmarks.measured`.

Validates all files beside this one against the schema, prints the ratio of each method and GPU, and draws
`docs/measured.png`. Nothing is fitted to the measurements, and nothing is skipped: a case that ran out of memory or
failed is counted.
"""
