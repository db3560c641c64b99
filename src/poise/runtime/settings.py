"""What a user may state when a Balancer is made, checked before anything starts."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal, TypeGuard

from poise.core.learning_rate import RULES, unknown_rule
from poise.core.limits import UNLIMITED
from poise.core.liveness import Limits
from poise.core.order import check_seed
from poise.engine.adaptation import Adaptation
from poise.engine.modes import Mode, mode_of
from poise.errors import InvalidSetting
from poise.numbers import is_number, is_whole
from poise.policy import Policy, policy_named
from poise.runtime.counts import CountFunction
from poise.runtime.slicing import Slicer

Arrangement = Callable[[list[int]], list[int]]
SILENT_S = Limits.silent_s
"""How long a worker may give no sign of life, unless the user says otherwise."""
LEAST_SILENT_S, LEAST_HANG_S, MOST_S = 1.0, 0.1, 30 * 24 * 3600.0
"""Signs of life are a twentieth of `silent_s` apart; a limit beyond a month is no limit."""
Idle = Literal["empty", "repeat"]
"""What a worker without a sample gets: an empty batch, or a sample twice at weight 0."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the user stated; `Balancer` says what each means."""

    global_batch: int
    policy: Policy
    mode: Mode | None = None
    adapt: Adaptation | None = None
    rule: str | None = None
    scaler: Any = None
    seed: int = 0
    count: CountFunction | None = None
    micro_batch: Any = None
    slicer: Slicer | None = None
    idle: Idle = "empty"
    silent_s: float = SILENT_S
    hang_s: float | None = None
    record: str | PathLike[str] | None = None
    arranged: Arrangement | None = None
    """Puts the samples of each share into another order; an instrument's to state."""

    @property
    def limits(self) -> Limits:
        """How long to wait for other workers."""
        stated = {} if self.hang_s is None else {"hang_s": self.hang_s}
        return Limits(silent_s=self.silent_s, **stated)

    def __post_init__(self) -> None:
        if not is_number_of_samples(self.global_batch):
            raise InvalidSetting(
                f"global_batch={self.global_batch!r} is not a number of samples; "
                "give a whole number from 1"
            )
        if self.idle not in ("empty", "repeat"):
            raise InvalidSetting(f'idle={self.idle!r} is unknown; use "empty" or "repeat"')
        _check_seconds("silent_s", self.silent_s, LEAST_SILENT_S)
        if self.hang_s is not None:
            _check_seconds("hang_s", self.hang_s, LEAST_HANG_S, ", or None")
        for name, function in (("count", self.count), ("slicer", self.slicer)):
            if function is not None and not callable(function):
                raise InvalidSetting(f"{name}={function!r} is not a function; give one, or None")
        check_seed(self.seed)
        if self.record is not None:
            _check_path("record", self.record)


def _check_path(name: str, path: object) -> None:
    """Raise unless a file can have this name."""
    try:
        text = os.fspath(path)  # type: ignore[call-overload]
        usable = isinstance(text, str) and bool(text) and "\0" not in text
        os.fsencode(text)
    except (TypeError, ValueError):
        usable = False
    if not usable:
        raise InvalidSetting(f"{name}={path!r} is no path; give the name of a file as text")


def _check_seconds(name: str, value: object, least: float, otherwise: str = "") -> None:
    if not is_number(value) or not least <= value <= MOST_S:
        raise InvalidSetting(
            f"{name}={value!r} is not a usable time; give seconds from {least:g} to "
            f"{MOST_S:.0f}{otherwise}"
        )


def as_held(
    *, policy: object, mode: object, adapt: object, rate: Any, scaler: Any, **others: Any
) -> dict[str, Any]:
    """Return what a user states as `Settings` holds it, or raise if it cannot be."""
    return {
        "policy": checked_policy(policy),
        "mode": None if mode is None else mode_of(mode),
        "adapt": checked_adaptation(adapt, rate, scaler),
        "rule": rate,
        "scaler": scaler,
        **others,
    }


def checked_adaptation(adapt: object, rate: object, scaler: object) -> Adaptation | None:
    """Return in which range the global batch may move; None: it stays as it is."""
    if rate is not None and adapt is None:
        raise InvalidSetting(
            f"rate={rate!r} says how the learning rate follows the global batch, which stays as it "
            "is; leave rate out, or let the global batch move: adapt=(lowest, highest)"
        )
    if rate is not None and rate not in RULES:
        raise unknown_rule("rate", rate)
    wanted = ("scale", "is_enabled")
    if scaler is not None and (
        isinstance(scaler, type)
        or not all(callable(getattr(scaler, name, None)) for name in wanted)
    ):
        raise InvalidSetting(
            f"scaler={scaler!r} is no GradScaler; give the one that scales the losses, or None"
        )
    match adapt:
        case None:
            return None
        case (lowest, highest) if is_number_of_samples(lowest) and is_number_of_samples(highest):
            return Adaptation(lowest=lowest, highest=highest)
    raise InvalidSetting(
        f"adapt={adapt!r} is no range of global batches; give two whole numbers from 1, such "
        "as adapt=(64, 4096)"
    )


def checked_policy(policy: object) -> Policy:
    """Return the policy of a name or a policy object, or raise."""
    if isinstance(policy, str):
        policy = policy_named(policy)
    if isinstance(policy, type) or not isinstance(policy, Policy):
        raise InvalidSetting(
            f"policy={policy!r} is not a policy; "
            'use a name such as "even", Fixed([...]), or an object with init and update'
        )
    return policy


def most_samples(micro_batch: Any, worker: int, workers: int) -> int | None:
    """Return the largest part of a local batch on this worker, as `micro_batch` says."""
    each_one = isinstance(micro_batch, list | tuple)
    stated: list[int | None] = list(micro_batch) if each_one else [micro_batch] * workers
    if len(stated) != workers:
        raise InvalidSetting(
            f"micro_batch={micro_batch!r} does not fit {workers} workers; "
            "give one number, or one for each worker"
        )
    for most in stated:
        if most is not None and not is_number_of_samples(most):
            raise InvalidSetting(
                f"micro_batch={micro_batch!r} has {most!r}, which is not a number of samples; "
                "give whole numbers from 1, or None for no limit"
            )
    return stated[worker]


def is_number_of_samples(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number from 1, and no larger than any batch is."""
    return is_whole(value) and 1 <= value <= UNLIMITED
