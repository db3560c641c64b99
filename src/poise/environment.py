"""The only module that reads environment variables."""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """A worker's place as torchrun or another launcher set it."""

    worker: int
    workers: int
    address: str
    """Where the workers meet: host and port."""


def launched_as() -> Launch | None:
    """Return this process's place among the workers, or None if no launcher gave it one."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    return Launch(
        worker=int(os.environ["RANK"]),
        workers=int(os.environ["WORLD_SIZE"]),
        address=f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}",
    )


def agent_hosts_store() -> bool:
    """Whether the launcher itself, and not worker 0, hosts what the workers meet at."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def local_workers() -> int | None:
    """Return how many workers the launcher started on this machine, or None if it does not say."""
    stated = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(stated) if stated.isdigit() else None


def openmp_threads() -> int | None:
    """Return the number of OpenMP threads asked for, or None."""
    stated = os.environ.get("OMP_NUM_THREADS", "")
    return int(stated) if stated.isdigit() else None


def gloo_interface() -> str | None:
    """Return the interface whose address gloo gives to other workers, or None."""
    return os.environ.get("GLOO_SOCKET_IFNAME") or None


def server_address() -> str | None:
    """Return host and port of the server that this process is to join, or None."""
    return os.environ.get("POISE_SERVER") or None


def shared_secret() -> bytes | None:
    """Return the secret that a server and its workers share, or None."""
    return os.environ.get("POISE_SECRET", "").encode() or None


def for_secret(secret: str) -> dict[str, str]:
    """Return the variable by which a server and its workers share a secret."""
    return {"POISE_SECRET": secret}


def for_server() -> dict[str, str]:
    """Return this environment without a launcher's place, which a server has not."""
    placing = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "POISE_SERVER")
    return {
        k: v
        for k, v in os.environ.items()
        if k not in placing and not k.startswith("TORCHELASTIC_")
    }


def for_joining(worker: int, workers: int, address: str) -> dict[str, str]:
    """Return this environment with the variables of a worker, from 1, that joins a local server.

    As under a launcher, the server counts as number 0.
    """
    return {
        **for_server(),
        "RANK": str(worker),
        "LOCAL_RANK": str(worker - 1),
        "WORLD_SIZE": str(workers + 1),
        "LOCAL_WORLD_SIZE": str(workers),
        "POISE_SERVER": address,
    }


def for_worker(worker: int, workers: int, port: int) -> dict[str, str]:
    """Return this environment with the variables that place a worker in a local group."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
    return {
        **inherited,
        "RANK": str(worker),
        "LOCAL_RANK": str(worker),
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
