"""A project of the user to begin with: data, task, reward and experiment."""
