"""Runs at W&B and trackio."""
