"""How a worker meets the others, and why it could not: what its error advises.

Gloo tells only the worker whose connection is refused. The others wait inside of it for whoever
does not come, five times as long as its limit says, and nothing ends that wait. So a worker that
fails leaves word at the store, and a thread of each other one looks there.
"""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch.distributed import Store

from poise.core.reachability import is_own, why_not_met
from poise.environment import Launch, local_workers
from poise.errors import InvalidSetting
from poise.runtime.reaching import host_and_port, look_at, own_addresses, source_toward

_FAILED = "failed"
_LOOK_S = 0.5
_GRACE_S = 2.0
"""How long torch has to raise by itself, once it is known that it must."""
_ELSE = "look for one that failed before its Balancer"


def advice_on_meeting(launch: Launch | None, error: str) -> str:
    """Say what probably kept this worker from meeting the others, and what to set.

    It takes up to a few seconds: names are resolved, and worker 0's address is tried.

    Args:
        launch: this worker's place, as its launcher says.
        error: what gloo or the store said.
    """
    if launch is None or local_workers() == launch.workers:
        return _ELSE
    try:
        host, port = host_and_port(launch.address)
    except InvalidSetting:  # MASTER_ADDR or MASTER_PORT is missing, as the error says
        return _ELSE
    sight, end = look_at(host, port)
    if end is not None:
        end.close()
    own = own_addresses(source_toward(sight.addresses[0]) if sight.addresses else None)
    here = any(is_own(own, address) for address in sight.addresses)
    several = local_workers() is not None or not here
    return why_not_met(own, sight, error, several_machines=several) or _ELSE


@contextmanager
def meeting(store: Store, launch: Launch, limit_s: float) -> Iterator[None]:
    """Make process groups in here; if another worker fails in it, or time is up, so does this one.

    Where torch does not come back, this process ends, with a line that says why.
    """
    clone: Any = store.clone()  # type: ignore[attr-defined] # not in torch's stubs
    over = threading.Event()

    def look() -> None:
        why = _news(clone, over, limit_s)
        if why is not None and not over.wait(_GRACE_S):
            advice = advice_on_meeting(launch, why)
            sys.stderr.write(f"poise: worker {launch.worker}: {why}; {advice}\n")
            sys.stderr.flush()
            os._exit(1)

    thread = threading.Thread(target=look, name="poise-meeting", daemon=True)
    thread.start()
    try:
        yield
    except RuntimeError as error:
        with suppress(RuntimeError):
            store.set(
                _FAILED, f"worker {launch.worker} could not meet the others: {_first_line(error)}"
            )
        over.wait(2 * _LOOK_S)  # this process may host the store, and the others look there
        raise
    finally:
        over.set()
        thread.join(_GRACE_S)


def _news(store: Store, over: threading.Event, limit_s: float) -> str | None:
    """Return why the workers cannot meet, as soon as that is known; None: they have met."""
    waited_s = 0.0
    while not over.wait(_LOOK_S):
        waited_s += _LOOK_S
        try:
            if store.check([_FAILED]):
                return store.get(_FAILED).decode()
        except RuntimeError as error:
            return f"worker 0, where all workers meet, is gone: {_first_line(error)}"
        if waited_s > limit_s:
            return f"the workers have not met within {limit_s:g} s"
    return None


def _first_line(error: RuntimeError) -> str:
    return str(error).splitlines()[0]
