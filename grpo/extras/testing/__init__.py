"""Commands of users in the processes of tests and benchmarks."""
