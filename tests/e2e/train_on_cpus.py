"""`python -m grpo.train` where accelerate can shard over CPUs; started by torchrun."""

from tests.sharding_on_cpus import enable

if __name__ == "__main__":
    enable()
    from grpo.train import main

    main()
