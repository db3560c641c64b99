"""Signs of life, and who is to blame when a connection breaks or a wait takes too long."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

SILENCE_S = 2.0
"""A worker whose connection broke and that gives no sign of life for so long is dead."""


@dataclass(frozen=True, kw_only=True)
class Sign:
    """What a worker last said of itself."""

    worker: int
    host: str
    pid: int
    namespace: int = 0
    """Tells apart machines, or containers, whose process ids mean different processes."""
    beat: int = 0
    """Counts up while the process lives."""
    step: int = 0
    """The step it is at."""
    reductions: int = 0
    """Gradient reductions it has entered so far."""
    calls: int = 0
    """Other calls that all workers make together (mean, prepare) it has entered so far."""
    state: Literal["running", "done", "left"] = "running"
    """Done: it reached the end of its script. Left: it stopped before the end."""
    why: str = ""
    """The reason for leaving."""
    lost: int | None = None
    """The worker for whose sake it left, if it did not fail itself."""

    @property
    def reached(self) -> tuple[int, int]:
        """How far it is in the calls that all workers make together."""
        return self.reductions, self.calls

    @property
    def address(self) -> str:
        """The worker as people can find it."""
        return f"worker {self.worker} (process {self.pid} on {self.host})"

    def to_json(self) -> str:
        """Return the sign as text, which is all that travels."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> "Sign":
        """Read a sign."""
        return Sign(**json.loads(text))


@dataclass(frozen=True)
class Blame:
    """The worker that is lost, and the sentence that says so."""

    worker: int
    reason: str


def find_culprit(
    mine: Sign,
    before: Mapping[int, Sign],
    now: Mapping[int, Sign],
    *,
    waited_s: float,
    timed_out: bool,
    gone: frozenset[int] = frozenset(),
) -> Blame | None:
    """Name the worker to blame, or None while that cannot be said.

    before and now are the peers' signs when the trouble showed and waited_s later; gone are the
    peers whose process is known not to exist any more. A worker's own word counts most, then
    what others found out, then silence, then being behind.
    """
    for peer in now.values():
        if peer.state == "left" and peer.lost is None:
            return Blame(peer.worker, f"{peer.address} left at step {peer.step}: {peer.why}")
    for peer in now.values():
        if peer.lost is not None:
            return Blame(peer.lost, peer.why)
    for peer in now.values():
        if peer.state == "done" and peer.reached < mine.reached:
            return Blame(
                peer.worker,
                f"{peer.address} ended after step {peer.step} without an error of its own, "
                f"while others go on to step {mine.step}",
            )
    for peer in now.values():
        silent = waited_s >= SILENCE_S and peer.beat == before[peer.worker].beat
        if peer.worker in gone or (silent and peer.state == "running" and not timed_out):
            # Its last word may be a moment old, but it cannot be behind: steps are synchronous.
            return Blame(peer.worker, f"{peer.address} died at step {max(peer.step, mine.step)}")
    behind = [peer for peer in now.values() if peer.reached < mine.reached]
    if timed_out and behind and waited_s >= SILENCE_S:
        peer = min(behind, key=lambda peer: peer.reached)
        alive = peer.beat != before[peer.worker].beat
        life = "its process is alive" if alive else "it gives no sign of life"
        step = max(peer.step, mine.step)
        return Blame(
            peer.worker,
            f"{peer.address} hangs at step {step}: the others wait for it in vain, and {life}",
        )
    return None
