"""The making of the built-in policies, which runs only load."""
