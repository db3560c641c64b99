"""Signs of life, and who is to blame when one worker keeps the others from going on.

Two numbers bound every wait: `silent_s`, after which a worker without a sign of life is lost, and
`hang_s`, after which one that lives and does not arrive is. All other limits follow from them.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

Trouble = Literal["broken", "timed out"]
"""What this worker saw itself: a connection broke, or it waited for `hang_s`."""
Process = Literal["unknown", "alive", "idle", "stopped", "ended"]
"""What this machine knows of a worker's process; nothing, if it runs on another machine. Idle: it
exists, and neither computes nor gives a sign of life."""


@dataclass(frozen=True)
class Limits:
    """How long to wait for what.

    >>> limits = Limits(silent_s=10.0)
    >>> limits.beat_s, limits.broken_s
    (0.5, 2.0)
    """

    silent_s: float = 10.0
    """A worker that gives no sign of life for so long is lost."""
    hang_s: float = 1800.0
    """A worker that gives signs of life, and that others wait for so long, hangs."""

    @property
    def beat_s(self) -> float:
        """From one sign of life to the next."""
        return self.silent_s / 20

    @property
    def broken_s(self) -> float:
        """A worker whose connection broke is dead after this much silence."""
        return self.silent_s / 5

    @property
    def doubt_s(self) -> float:
        """After so long without news, what was heard last may no longer be so."""
        return self.silent_s / 5

    @property
    def search_s(self) -> float:
        """After so long, nobody can be found any more who is to blame."""
        return self.silent_s + self.doubt_s


@dataclass(frozen=True, kw_only=True)
class Sign:
    """What a worker last said of itself."""

    worker: int
    host: str
    pid: int
    place: str = ""
    """Where its process number has a meaning: one boot of one machine, or a container there."""
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
    note: str = ""
    """What else the others may want to know of it."""
    knows: bool = False
    """Whether it needs to hear nothing more: it has heard who is to blame, or leaves."""

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

    def to_json(self) -> str:
        """Return it as text."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Blame":
        """Read it."""
        return Blame(**json.loads(text))


@dataclass(frozen=True)
class Heard:
    """What the rendezvous said last."""

    signs: Mapping[int, Sign] = field(default_factory=dict)
    """Of those that are watched, and have given one."""
    silent_s: Mapping[int, float] = field(default_factory=dict)
    """How long each of them has given no new one."""
    absent_s: Mapping[int, float] = field(default_factory=dict)
    """How long those that are watched, and have never given one, have been waited for."""
    cause: Blame | None = None
    """Who is to blame, as the first one found out who looked; it is never replaced."""

    def hear(
        self,
        signs: Mapping[int, Sign],
        cause: Blame | None,
        passed_s: float,
        absent: Collection[int] = (),
    ) -> "Heard":
        """Return what is known after another look, so many seconds of this worker's own later.

        A worker that was stopped itself, and wakes up, has not heard the others for as long, and
        must not blame them: whoever calls this counts only the time in which it could have heard.
        """
        silent_s = {
            worker: 0.0
            if worker not in self.signs or self.signs[worker].beat != sign.beat
            else self.silent_s.get(worker, 0.0) + passed_s
            for worker, sign in signs.items()
        }
        absent_s = {worker: self.absent_s.get(worker, 0.0) + passed_s for worker in absent}
        return Heard(signs, silent_s, absent_s, self.cause or cause)


@dataclass(frozen=True)
class View:
    """All that one worker knows when it looks for a culprit."""

    mine: Sign
    heard: Heard
    processes: Mapping[int, Process] = field(default_factory=dict)
    """Of other workers on this machine."""
    trouble: Trouble | None = None
    launcher: str | None = None
    """The launcher that hosts the rendezvous, in words; None: worker 0 does."""
    deaf_s: float = 0.0
    """How long the rendezvous has not answered."""
    gone: bool = False
    """Whether it never will: the connection with its host has ended."""
    limits: Limits = Limits()

    @property
    def running(self) -> list[Sign]:
        """Peers that are neither done nor gone by their own word, the most silent first."""
        peers = [peer for peer in self.heard.signs.values() if peer.state == "running"]
        return sorted(peers, key=lambda peer: -self.silent_s(peer))

    def silent_s(self, peer: Sign) -> float:
        """How long it has given no sign of life."""
        return self.heard.silent_s[peer.worker]

    def process(self, peer: Sign) -> Process:
        """What is known of its process."""
        return self.processes.get(peer.worker, "unknown")

    def step(self, peer: Sign) -> int:
        """The step it is at: its word may be a moment old, but steps are synchronous."""
        return max(peer.step, self.mine.step)


def find_culprit(view: View) -> Blame | None:
    """Name the worker to blame, or None while that cannot be said.

    A worker's own word counts most, then that the rendezvous does not answer, then that a process
    has ended, then that a worker came to the end of its script while others go on, then silence,
    and after a time-out being behind. That the rendezvous is gone may have any of these causes.
    """
    looks = (
        _left,
        _host_silent,
        _ended,
        _done_early,
        _cut_off,
        _silent,
        _absent,
        _behind,
        _host_gone,
    )
    for look in looks:
        blame = look(view)
        if blame is not None:
            return blame
    return None


def leaving(peer: Sign) -> str:
    """Say why a worker stopped, in its own words."""
    return f"{peer.address} left at step {peer.step}: {peer.why}"


def _left(view: View) -> Blame | None:
    for peer in view.heard.signs.values():
        if peer.state == "left" and not peer.knows:
            return Blame(peer.worker, leaving(peer))
    return None


def _host_silent(view: View) -> Blame | None:
    if view.gone or view.deaf_s < view.limits.silent_s or not _needs_host(view):
        return None
    silence = f"no sign of life for {view.limits.silent_s:g} s at step {view.mine.step}"
    gone = "its process is stopped, or its machine or link is gone"
    if view.launcher is not None:
        return Blame(0, f"{view.launcher} has given {silence}: {gone}")
    return Blame(0, f"{_host(view)} has given {silence}: its store does not answer; {gone}")


def _host_gone(view: View) -> Blame | None:
    if not view.gone or not _needs_host(view):
        return None
    if view.launcher is not None:
        return Blame(0, f"{view.launcher} ended at step {view.mine.step}: its store is gone")
    return Blame(0, f"{_host(view)} died at step {view.mine.step}: its store is gone")


def _needs_host(view: View) -> bool:
    """Whether the end of the rendezvous can be what is wrong, as seen by this worker."""
    if view.mine.state != "running":
        return False
    if view.launcher is not None:
        return True
    worker_0 = view.heard.signs.get(0)  # whose rendezvous ends with its work, as this one's will
    return view.mine.worker != 0 and (worker_0 is None or worker_0.state != "done")


def _host(view: View) -> str:
    worker_0 = view.heard.signs.get(0)
    return "worker 0" if worker_0 is None else worker_0.address


def _ended(view: View) -> Blame | None:
    if view.gone and view.launcher is not None:
        return None  # whoever died before it was named while it answered; others end for its sake
    if view.deaf_s > view.limits.doubt_s and not view.gone and _needs_host(view):
        return None  # perhaps it ended because the rendezvous does not answer: that is yet to show
    for peer in view.running:
        if view.process(peer) == "ended":
            return Blame(peer.worker, f"{peer.address} died at step {view.step(peer)}")
    return None


def _done_early(view: View) -> Blame | None:
    for peer in view.heard.signs.values() if view.trouble else ():
        if peer.state == "done" and peer.reached < view.mine.reached:
            return Blame(
                peer.worker,
                f"{peer.address} ended after step {peer.step} without an error of its own, "
                f"while others go on to step {view.mine.step}",
            )
    return None


def _cut_off(view: View) -> Blame | None:
    """Several workers on other machines that fall silent together: it is this one's link."""
    peers, mine, limits = view.running, view.mine, view.limits
    if len(peers) <= 1 or any(view.process(peer) != "unknown" for peer in peers):
        return None
    longest, shortest = view.silent_s(peers[0]), view.silent_s(peers[-1])
    if longest < limits.silent_s or longest - shortest > limits.doubt_s:
        return None
    return Blame(
        mine.worker,
        f"{mine.address} is cut off at step {mine.step}: none of the others has given a sign of "
        f"life for {limits.silent_s:g} s",
    )


def _silent(view: View) -> Blame | None:
    limits = view.limits
    for peer in view.running:
        process, silent_s = view.process(peer), view.silent_s(peer)
        if view.trouble == "broken" and process == "unknown" and silent_s >= limits.broken_s:
            return Blame(peer.worker, f"{peer.address} died at step {view.step(peer)}")
        if silent_s >= limits.silent_s and process != "alive":
            cause = "its process is stopped, or its machine or link is gone"
            if process == "stopped":
                cause = "its process is stopped, by a signal or a debugger"
            return Blame(
                peer.worker,
                f"{peer.address} has given no sign of life for {limits.silent_s:g} s at step "
                f"{view.step(peer)}: {cause}",
            )
    return None


def _absent(view: View) -> Blame | None:
    """A worker that met the others, and was lost before its first sign of life."""
    limits = view.limits
    limit_s = limits.broken_s if view.trouble == "broken" else limits.silent_s
    for worker, absent_s in view.heard.absent_s.items():
        if absent_s >= limit_s:
            return Blame(
                worker,
                f"worker {worker} has given no sign of life since all workers met, before step "
                f"{view.mine.step}: it died or was stopped while its Balancer was made",
            )
    return None


def _behind(view: View) -> Blame | None:
    behind = [peer for peer in view.running if peer.reached < view.mine.reached]
    if view.trouble != "timed out" or not behind:
        return None
    peer = min(behind, key=lambda peer: peer.reached)
    silent = view.silent_s(peer) > view.limits.doubt_s
    life = "it gives no sign of life" if silent else "its process is alive"
    return Blame(
        peer.worker,
        f"{peer.address} hangs at step {view.step(peer)}: the others wait for it in vain, and "
        f"{life}",
    )
