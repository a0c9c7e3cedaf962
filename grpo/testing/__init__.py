"""Helpers of tests and benchmarks; no other module of `grpo` imports them."""
