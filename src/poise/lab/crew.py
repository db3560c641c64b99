"""The processes of a lab: its workers, and their server if there is one."""

from dataclasses import dataclass, field

from poise.lab.member import Member


@dataclass
class Crew:
    """Who is there, and who has ended."""

    first: int
    """What the first worker is called: with a server, that is 0."""
    workers: list[Member] = field(default_factory=list)
    server: Member | None = None

    def everybody(self) -> list[Member]:
        """Return all that have been started."""
        return [*self.workers, *(() if self.server is None else (self.server,))]

    def number(self, worker: int) -> int:
        """Return what a worker is called."""
        return self.first + worker

    def running(self) -> bool:
        """Whether a worker is left."""
        return any(member.process.poll() is None for member in self.workers)

    def failed(self) -> dict[int, int]:
        """Return the workers that have failed, with what their processes returned."""
        codes = ((worker, each.process.poll()) for worker, each in enumerate(self.workers))
        return {worker: code for worker, code in codes if code}

    def missing(self) -> int | None:
        """Return a worker that has ended and without which training never starts.

        Once it has, the server ends by itself when all workers are lost.
        """
        if any(member.steps for member in self.workers):  # training has started
            return None
        ended = (n for n, member in enumerate(self.workers) if member.process.poll() is not None)
        return next(ended, None)
