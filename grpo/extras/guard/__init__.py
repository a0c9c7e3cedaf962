"""Looks at the held-out accuracy of a run: after a fall the run goes back to its best checkpoint."""
