"""Reward functions: plain functions with TRL's signature, one per file."""
