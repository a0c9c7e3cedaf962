"""Tables of plans: the memory of models by methods, and the longest completion that fits."""
