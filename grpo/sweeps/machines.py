"""A job of a sweep on several machines of Slurm: submitit calls the job on each of them."""

FIRST_PORT, PORTS = 20000, 20000


def rendezvous(nodes: int) -> tuple[list[str], bool]:
    """Return the overrides with which the machines of this job of Slurm meet, and whether this is the first of them.

    Args:
        nodes: `launch.nodes`; one machine meets nobody.
    """
    if nodes == 1:
        return [], True
    from submitit import JobEnvironment  # only jobs that it has submitted come here

    slurm = JobEnvironment()
    port = FIRST_PORT + int(slurm.raw_job_id) % PORTS
    return [f"launch.rendezvous={slurm.hostnames[0]}:{port}"], slurm.node == 0
