"""Control traffic over gloo, and the launcher's store as a rendezvous."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DistError, ProcessGroup, Store

from poise.core.timing import Floats
from poise.errors import PoiseError
from poise.runtime.collectives import Disconnected, Numbers
from poise.runtime.rendezvous import RendezvousLost
from poise.torch.sockets import Sockets

_GROUPS_OWN = timedelta(0)
"""For torch: wait as long as the group's own limit says."""


@dataclass(frozen=True, eq=False)
class GlooPending:
    """An operation of torch's, and the memory that it works on."""

    work: dist.Work
    tensors: Sequence[Tensor]

    def done(self) -> bool:
        """Whether its result is there."""
        return bool(self.work.is_completed())

    def wait(self, limit_s: float | None = None) -> None:
        """Wait for its result, or raise Disconnected."""
        with disconnecting():
            self.work.wait(_GROUPS_OWN if limit_s is None else timedelta(seconds=limit_s))


class GlooCollectives:
    """The operations of one process group of torch's, for small tensors on the CPU.

    They are the group's own: the functions of torch.distributed take twice as long.
    """

    def __init__(self, group: ProcessGroup, cut: Callable[[], None]) -> None:
        """Take the group, and what ends the waits in all groups of this worker."""
        self._group: Any = group
        self._cut = cut
        self.worker = group.rank()
        self.workers = group.size()

    def sum(self, table: Floats) -> GlooPending:
        """Add up everybody's table, in place."""
        tensor = torch.from_numpy(table)
        with disconnecting():
            return GlooPending(self._group.allreduce([tensor]), [tensor])

    def broadcast(self, values: Numbers, source: int) -> GlooPending:
        """Replace everybody's values by those of one worker."""
        tensor = torch.from_numpy(values)
        with disconnecting():
            return GlooPending(self._group.broadcast(tensor, root=source), [tensor])

    def gather(self, row: Floats, rows: Floats | None) -> GlooPending:
        """Give worker 0 everybody's row."""
        tensor = torch.from_numpy(row)
        room = [] if rows is None else list(torch.from_numpy(rows).unbind())
        with disconnecting():
            work = self._group.gather(output_tensors=room, input_tensor=tensor, root=0)
        return GlooPending(work, [tensor, *room])

    def cut(self) -> None:
        """End what waits."""
        self._cut()

    def close(self) -> None:
        """Let go of the group, whose connections end with its last reference."""
        self._group = None


class StoreRendezvous:
    """A store of torch's: what one worker sets, all get."""

    def __init__(
        self, store: Store, launcher: str | None, port: int | None, limit_s: float
    ) -> None:
        """Connect with the store's host, by a connection of its own, within a limit."""
        self.launcher = launcher
        self.sockets = Sockets(port)
        with self.sockets.opening(limit_s):
            self._store: Store = store.clone()  # type: ignore[attr-defined] # not in torch's stubs
        self._seen: set[str] = set()
        """Keys that are known to be there; a store waits for others."""

    def set(self, key: str, text: str) -> None:
        """Leave a text."""
        with _hosted():
            self._store.set(key, text)

    def get(self, keys: Sequence[str]) -> dict[str, str]:
        """Return those texts that are there."""
        with _hosted():
            unseen = [key for key in keys if key not in self._seen]
            self._seen |= {key for key in unseen if self._store.check([key])}
            there = [key for key in keys if key in self._seen]
            texts = self._store.multi_get(there) if there else []
            return {key: text.decode() for key, text in zip(there, texts, strict=True)}

    def first(self, key: str, text: str) -> str:
        """Leave a text unless there is one."""
        with _hosted():
            return self._store.compare_set(key, "", text).decode()

    def cut(self) -> None:
        """Shut down the connection."""
        self.sockets.cut()


class disconnecting:  # noqa: N801 (read as a verb, like contextlib's own)
    """Raises what torch says of a broken connection or a time-out as Disconnected."""

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            raise_if_disconnected(error)


def raise_if_disconnected(error: RuntimeError) -> None:
    """Raise Disconnected if that is what an error of torch's says.

    The trace of torch's error is dropped: its frames hold DistributedDataParallel, and so the
    connections by whose end others notice that this worker leaves.
    """
    if is_disconnection(error):
        raise disconnection(error) from error.with_traceback(None)


def is_loss(error: BaseException) -> bool:
    """Whether an error that a script did not expect is the loss of another worker."""
    words = ("Connection closed by peer", "Connection reset by peer", "imed out")
    known = isinstance(error, RuntimeError) and is_disconnection(error)
    return known and (isinstance(error, DistError) or any(each in str(error) for each in words))


def is_disconnection(error: RuntimeError) -> bool:
    """Whether an error of torch's says that another worker is gone or late."""
    text = str(error)
    between_workers = isinstance(error, DistError) or "gloo" in text or "NCCL" in text
    return between_workers and not isinstance(error, PoiseError)


def disconnection(error: RuntimeError) -> Disconnected:
    """Return what torch says of a broken connection or a time-out."""
    return Disconnected(str(error), timed_out="imed out" in str(error))


@contextmanager
def _hosted() -> Iterator[None]:
    """Raise what a store says whose host is gone as RendezvousLost."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise RendezvousLost(str(error)) from error
