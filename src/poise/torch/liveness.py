"""Heartbeats on the store, and the search for the worker that is lost.

A collective that takes long proves nothing: worker 0 may evaluate for ten minutes. A worker is
lost when its connection broke, when it said so itself, or when the hang limit has passed.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed import Store

from poise.core.liveness import Blame, Sign, find_culprit
from poise.errors import PoiseError, WorkerLost

_BEAT_S = 0.5
_POLL_S = 0.1
_SEARCH_S = 6.0
"""How long to look for the culprit before giving up on a name."""


class Liveness:
    """This worker's heartbeat, and its view of the others."""

    def __init__(self, worker: int, workers: int, store: Store) -> None:
        self.sign = Sign(
            worker=worker,
            host=socket.gethostname(),
            namespace=_process_namespace(),
            pid=os.getpid(),
        )
        self._peers = [peer for peer in range(workers) if peer != worker]
        self._store = getattr(store, "clone", lambda: store)()
        self._stop = threading.Event()
        self._changing = threading.Lock()
        self._telling = threading.Lock()
        self._thread = threading.Thread(target=self._beat, name="poise-heartbeat", daemon=True)
        self._say()
        if self._peers:
            self._thread.start()

    def note(self, **changes: Any) -> None:
        """Change what the next heartbeat tells."""
        with self._changing:
            self.sign = replace(self.sign, **changes)

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Run a call that all workers make together, and count it."""
        self.note(calls=self.sign.calls + 1)
        with self.watch(doing):
            yield

    @contextmanager
    def watch(self, doing: str) -> Iterator[None]:
        """Run something that waits for others; a failure names the worker that is lost."""
        try:
            yield
        except PoiseError:
            raise
        except RuntimeError as error:
            raise self.lost(doing, error) from error

    def lost(self, doing: str, error: Exception) -> WorkerLost:
        """Find out who is lost, say so on stderr and to the others, and return the error."""
        blame = self._search(timed_out="imed out" in str(error))
        if blame is None:
            cause = str(error).splitlines()[0]
            message = f"{doing} failed and no worker could be found at fault: {cause}"
        else:
            message = f"{blame.reason} ({doing} cannot go on)"
        self._leave(message if blame is None else blame.reason, blame.worker if blame else None)
        sys.stderr.write(f"poise: worker {self.sign.worker}: {message}\n")
        sys.stderr.flush()
        self._linger(blame)
        return WorkerLost(message)

    def fail(self, why: str) -> None:
        """Tell the others that this worker stops because of an error of its own."""
        if self.sign.state == "running":
            self._leave(why, None)
        self._end()

    def finish(self) -> None:
        """Say that this worker is done, and wait until every other one is done or lost.

        A process that ends while others still talk can abort them. The wait ends as soon as a
        peer is found waiting for something that this worker will never do.
        """
        try:
            self._say(state="done")
            before, since = self._signs(), time.monotonic()
            while True:
                now = self._signs()
                if all(peer.state != "running" for peer in now.values()):
                    break
                if any(peer.reached > self.sign.reached for peer in now.values()):
                    break
                if any(now[peer].beat != before[peer].beat for peer in now):
                    before, since = now, time.monotonic()
                if time.monotonic() - since > 10 * _BEAT_S:
                    break
                time.sleep(_POLL_S / 2)
        except (RuntimeError, OSError):
            pass  # the store ends with the worker that hosts it, which is done too
        self._end()

    def _linger(self, blame: Blame | None) -> None:
        """On worker 0, which may host the store: let the others find the same culprit first."""
        if self.sign.worker != 0:
            return
        deadline = time.monotonic() + _SEARCH_S / 2
        with suppress(RuntimeError, OSError):
            while time.monotonic() < deadline and any(
                peer.state == "running" and not self._gone(peer)
                for peer in self._signs().values()
                if blame is None or peer.worker != blame.worker
            ):
                time.sleep(_POLL_S)

    def _end(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _beat(self) -> None:
        while not self._stop.wait(_BEAT_S):
            try:
                self._say(beat=self.sign.beat + 1)
            except (RuntimeError, OSError):
                return  # no store, no heartbeat; the search for the culprit reports it

    def _say(self, **changes: Any) -> None:
        with self._telling:  # one at a time, so that no older sign follows a newer one
            self.note(**changes)
            self._store.set(f"sign/{self.sign.worker}", self.sign.to_json())

    def _leave(self, why: str, lost: int | None) -> None:
        with suppress(RuntimeError, OSError):  # without a store nobody is left to be told
            self._say(state="left", why=why, lost=lost)

    def _signs(self) -> dict[int, Sign]:
        if not self._peers:
            return {}
        texts = self._store.multi_get([f"sign/{peer}" for peer in self._peers])
        return {peer: Sign.from_json(text) for peer, text in zip(self._peers, texts, strict=True)}

    def _search(self, *, timed_out: bool) -> Blame | None:
        start = time.monotonic()
        try:
            before = now = self._signs()
            while (waited_s := time.monotonic() - start) < _SEARCH_S:
                blame = find_culprit(
                    self.sign,
                    before,
                    now,
                    waited_s=waited_s,
                    timed_out=timed_out,
                    gone=frozenset(peer.worker for peer in now.values() if self._gone(peer)),
                )
                if blame is not None:
                    return blame
                time.sleep(_POLL_S)
                now = self._signs()
        except (RuntimeError, OSError):
            return Blame(
                0,
                f"worker 0 died at step {self.sign.step}: "
                "the store that it or its launcher hosts is gone",
            )
        return None

    def _gone(self, peer: Sign) -> bool:
        """Whether a peer's process on this machine has ended; False where that cannot be seen."""
        here = (self.sign.host, self.sign.namespace)
        if (peer.host, peer.namespace) != here or peer.state != "running":
            return False
        try:
            status = Path(f"/proc/{peer.pid}/stat").read_text()
        except FileNotFoundError:
            return Path("/proc/self/stat").exists()
        except OSError:
            return False
        return status.rpartition(")")[2].split()[0] in "ZX"


def _process_namespace() -> int:
    """Number the space in which process ids have a meaning; 0 where there is only one."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
