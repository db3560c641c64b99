"""What an engine has learned, as plain values that survive a checkpoint, and its reuse.

Speeds belong to devices: after a resume each worker gets what was known of a worker on a device
of its kind. A kind that is new counts as the mean of the others until it is measured.
"""

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from poise.core.observation import Change
from poise.engine.bsp import Engine
from poise.errors import StateMismatch
from poise.torch.saved import Saved


def device_kind(device: torch.device) -> str:
    """Return what tells fast devices from slow ones: the name of the model.

    >>> device_kind(torch.device("cpu")).endswith("threads")
    True
    """
    if device.type == "cpu":
        return f"{_processor()}, {torch.get_num_threads()} threads"
    module = torch.get_device_module(device)
    name = getattr(module, "get_device_name", lambda _: device.type)
    return str(name(device))


def saved_learned(engine: Engine, kinds: Sequence[str]) -> Saved:
    """Return what worker 0's engine knows, and of which kinds of devices."""
    return {"kinds": list(kinds), "engine": engine.state_dict()}


def load_learned(
    state: Mapping[str, Any], engine: Engine, kinds: Sequence[str]
) -> tuple[Engine, Change]:
    """Return the engine with what was saved, and the change to the workers there are now."""
    try:
        before, known = list(state["kinds"]), engine.load_state_dict(state["engine"])
    except (KeyError, TypeError) as error:
        raise StateMismatch(
            f"what the state says of speeds is damaged ({error!r}); load another one"
        ) from None
    return known, Change(same_kind(before, kinds), engine.global_batch)


def same_kind(before: Sequence[str], now: Sequence[str]) -> tuple[int | None, ...]:
    """Return for each device now the number of one of its kind before; None: there was none.

    Each of those before is taken once, in order, until there are more now.

    >>> same_kind(["new", "old", "old"], ["old", "new", "old", "new", "rare"])
    (1, 0, 2, 0, None)
    """
    free: dict[str, list[int]] = {}
    for number, kind in enumerate(before):
        free.setdefault(kind, []).append(number)
    first = {kind: numbers[0] for kind, numbers in free.items()}
    return tuple(free[kind].pop(0) if free.get(kind) else first.get(kind) for kind in now)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
