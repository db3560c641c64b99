"""The only module that reads environment variables."""

import os


def launched_as() -> tuple[int, int] | None:
    """Return (worker, workers) as torchrun or another launcher set them, or None."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def openmp_threads() -> int | None:
    """Return the number of OpenMP threads asked for, or None."""
    stated = os.environ.get("OMP_NUM_THREADS", "")
    return int(stated) if stated.isdigit() else None


def for_worker(worker: int, workers: int, port: int) -> dict[str, str]:
    """Return this environment with the variables that place a worker in a local group."""
    return {
        **os.environ,
        "RANK": str(worker),
        "LOCAL_RANK": str(worker),
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
