"""Tools and environments of a task, in processes of their own."""
