"""What `poise doctor` finds out, and what it advises: values and pure functions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CLOCKS_S = 1.0
"""How far clocks may be apart before a doctor says so."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What one worker says of itself."""

    worker: int
    host: str
    versions: Mapping[str, str]
    cores: int
    """CPU cores that this process may use."""
    threads: int
    """Threads that torch computes with."""
    openmp_threads: int | None = None
    """OMP_NUM_THREADS, if set."""
    local_workers: int | None = None
    """Workers on its machine, if the launcher says so."""
    accelerators: str = "none"
    lead: int | None = None
    """How many steps its loader runs ahead, if a script was given."""
    warnings: tuple[str, ...] = ()
    """What the script was warned of."""
    time_s: float | None = None
    """What its clock said when an all-reduce was over, in seconds since 1970."""


@dataclass(frozen=True)
class Examination:
    """What all workers together found out."""

    workers: tuple[Facts, ...]
    backend: str
    timings: Mapping[int, float]
    """Median seconds of an all-reduce by its bytes; empty where there is nobody to reduce with."""


def advice(workers: Sequence[Facts]) -> list[str]:
    """Return all warnings, each with what to do; the same one for several workers once."""
    hosts = [facts.host for facts in workers]
    found: dict[str, list[int]] = {}
    for facts in workers:
        threads = thread_warning(
            threads=facts.threads,
            cores=facts.cores,
            local_workers=facts.local_workers or hosts.count(facts.host),
        )
        for text in [*([threads] if threads else []), *facts.warnings]:
            found.setdefault(text, []).append(facts.worker)
    warnings = [f"{_names(numbers)}: {text}" for text, numbers in found.items()]
    return warnings + _version_warnings(workers) + _clock_warnings(workers)


def thread_warning(*, threads: int, cores: int, local_workers: int) -> str | None:
    """Return a warning when a worker computes with fewer threads than its part of the cores.

    >>> thread_warning(threads=1, cores=8, local_workers=2)
    '1 thread meets 4 idle cores; set OMP_NUM_THREADS=4 (torchrun sets 1 if it is not set)'
    >>> thread_warning(threads=1, cores=2, local_workers=3)
    """
    part = cores // local_workers
    if threads >= part:
        return None
    noun, verb = ("thread", "meets") if threads == 1 else ("threads", "meet")
    return (
        f"{threads} {noun} {verb} {part} idle cores; set OMP_NUM_THREADS={part} "
        "(torchrun sets 1 if it is not set)"
    )


def is_same_release(version: str, other: str | None) -> bool:
    """Whether versions differ in their build at most, as where one machine has a GPU.

    >>> is_same_release("2.13.0+cu130", "2.13.0+cpu"), is_same_release("2.13.0", "2.15.0")
    (True, False)
    """
    return other is not None and version.partition("+")[0] == other.partition("+")[0]


def _version_warnings(workers: Sequence[Facts]) -> list[str]:
    first = workers[0]
    return [
        f"{_names([facts.worker])}: {name} is {version}, on worker 0 it is "
        f"{first.versions.get(name)}; install the same versions everywhere"
        for facts in workers
        for name, version in facts.versions.items()
        if not is_same_release(version, first.versions.get(name))
    ]


def _clock_warnings(workers: Sequence[Facts]) -> list[str]:
    first_s = workers[0].time_s
    return [
        f"{_names([facts.worker])}: its clock is {abs(facts.time_s - first_s):.1f} s "
        f"{'ahead of' if facts.time_s > first_s else 'behind'} that of worker 0; set both by NTP "
        "(timedatectl set-ntp true)"
        for facts in workers
        if facts.time_s is not None and first_s is not None
        if abs(facts.time_s - first_s) > CLOCKS_S
    ]


def _names(numbers: Sequence[int]) -> str:
    noun = "worker" if len(numbers) == 1 else "workers"
    return f"{noun} {', '.join(map(str, numbers))}"
