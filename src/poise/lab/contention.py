"""Whether the speeds of a lab are what they say, by what the machine's cores were used for.

A quota is the most that a worker gets. Where other processes want the cores, too, it gets less.
"""

from dataclasses import dataclass

_SHORT = 0.95
"""Less than this part of what the speeds add up to must be left: no machine is quite idle."""
_IDLE = 0.1
"""Where more than this part of all cores was idle, workers could have had it."""


@dataclass(frozen=True)
class Sample:
    """What the cores of the lab had done up to a moment."""

    at_s: float
    busy_s: float
    """Seconds that all cores together computed, for anybody."""
    workers_s: tuple[float, ...]
    """Seconds that each worker computed, with all processes that it started,"""
    server_s: float
    """and the server, if there is one, and the lab itself."""
    speeds: tuple[float, ...]
    """What the workers are to get from here on, in cores."""


@dataclass(frozen=True)
class Contention:
    """The use of the cores between two moments, in cores."""

    cores: int
    others: float
    """What processes took that are not the lab's."""
    server: float
    got: tuple[float, ...]
    """By each worker."""
    speeds: tuple[float, ...]
    over_s: float

    @staticmethod
    def between(first: Sample, last: Sample, cores: int) -> "Contention":
        """Return what happened from one sample to another.

        >>> before = Sample(10.0, 50.0, (4.0, 2.0), 1.0, (0.9, 0.4))
        >>> after = Sample(15.0, 60.0, (6.0, 3.0), 1.75, (0.9, 0.4))
        >>> found = Contention.between(before, after, cores=2)
        >>> found.got, found.others
        ((0.4, 0.2), 1.25)
        """
        over_s = last.at_s - first.at_s
        got = tuple(
            max(0.0, late - early) / over_s
            for early, late in zip(first.workers_s, last.workers_s, strict=True)
        )
        server = max(0.0, last.server_s - first.server_s) / over_s
        busy = (last.busy_s - first.busy_s) / over_s
        others = max(0.0, busy - server - sum(got))
        return Contention(cores, others, server, got, first.speeds, over_s)

    @property
    def left(self) -> float:
        """The cores that are left for the workers."""
        return max(0.0, self.cores - self.others - self.server)

    @property
    def is_short(self) -> bool:
        """Whether less is left than the workers are to get, and nothing of it was idle.

        Workers that wait for each other take less than they may; that is no shortage.
        """
        idle = self.left - sum(self.got)
        return self.left < _SHORT * sum(self.speeds) and idle < _IDLE * self.cores

    def remark(self) -> str:
        """Say what was found, and what to do."""
        got = ", ".join(f"{each:.2f}" for each in self.got)
        asked = ", ".join(f"{each:g}" for each in self.speeds)
        return (
            f"other processes took {self.others:.2f} of {self.cores} cores in {self.over_s:.0f} s, "
            f"so {self.left:.2f} were left for speeds that add up to {sum(self.speeds):g}: workers "
            f"got {got} of {asked}, and are not as fast as these say; end what else runs, lower "
            "the speeds, or pace the workers"
        )
