"""Computes steps of a run again, and finds where two runs part."""
