"""Start the workers of one group as processes of this machine, and end them whatever happens."""

import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from poise.environment import for_worker

_GRACE_S = 5.0


@contextmanager
def local_workers(
    command: Sequence[str], workers: int, *, stderr: int | None = None
) -> Iterator[list[subprocess.Popen[str]]]:
    """Run a command once per worker, placed in one group on the loopback address.

    Standard output is a pipe; standard error passes through unless stated as in `subprocess`.
    Every process has ended when the block is left.
    """
    port = free_port()
    started: list[subprocess.Popen[str]] = []
    try:
        for worker in range(workers):
            started.append(
                subprocess.Popen(
                    command,
                    env=for_worker(worker, workers, port),
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    text=True,
                )
            )
        yield started
    finally:
        for process in started:
            _end(process)


def free_port() -> int:
    """Return a port of the loopback address that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def how_ended(code: int) -> str:
    """Say what a process returned.

    >>> how_ended(1), how_ended(-9)
    ('exit code 1', 'signal 9')
    """
    return f"exit code {code}" if code >= 0 else f"signal {-code}"


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
