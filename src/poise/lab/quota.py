"""CPU quotas: a control group that gets so many cores, whatever its processes want."""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from poise.errors import InvalidSetting
from poise.lab.speeds import checked_speed

_SHORTEST_PERIOD_US = 10_000
"""Longer ones make workers stall for long, shorter ones cost speed."""
_SMALLEST_QUOTA_US = 1_000
_MOUNTS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_REMOVAL_S = 2.0


class Quota:
    """A control group at a path, with its limit: cgroup v1 or v2, whichever is there.

    Works from any process that may write there, also from inside the group.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @classmethod
    def create(cls, path: str | Path, *, pid: int, speed: float) -> "Quota":
        """Make a group and put a process under its quota; its later children come along."""
        quota = cls(path)
        os.mkdir(quota.path)
        quota.set_speed(speed)
        quota.add(pid)
        return quota

    def add(self, pid: int) -> None:
        """Put one more process into the group, with all its threads."""
        try:
            (self.path / "cgroup.procs").write_text(str(pid))
        except ProcessLookupError:
            raise
        except OSError as error:
            raise InvalidSetting(
                f"the kernel refuses to put process {pid} into {self.path} ({error.strerror}); "
                "run as root, or in a group that is yours"
            ) from None

    def set_speed(self, speed: float) -> None:
        """Give the group so many cores from now on."""
        quota_us, period_us = limit_us(checked_speed(speed))
        try:
            if self._is_v2:
                (self.path / "cpu.max").write_text(f"{quota_us} {period_us}")
            else:
                self.lift()  # the kernel looks at quota and period together, but takes them singly
                (self.path / "cpu.cfs_period_us").write_text(str(period_us))
                (self.path / "cpu.cfs_quota_us").write_text(str(quota_us))
        except OSError as error:
            raise InvalidSetting(
                f"the kernel refuses a speed of {speed:g} for {self.path} ({error.strerror}); "
                "lower it, or raise the limit of the group around it"
            ) from None

    def lift(self) -> None:
        """Let the group compute without limit."""
        if self._is_v2:
            (self.path / "cpu.max").write_text("max")
        else:
            (self.path / "cpu.cfs_quota_us").write_text("-1")

    def processes(self) -> list[int]:
        """Return the ids of the processes in the group; 0 stands for one that we cannot see."""
        return [int(line) for line in (self.path / "cgroup.procs").read_text().split()]

    def remove(self) -> None:
        """Remove the group, once its processes have ended."""
        deadline = time.monotonic() + _REMOVAL_S
        while self.path.exists():
            try:
                os.rmdir(self.path)
            except OSError:  # a process that ends stays in its group for a moment
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    @property
    def _is_v2(self) -> bool:
        return not (self.path / "cpu.cfs_quota_us").exists()


def limit_us(speed: float) -> tuple[int, int]:
    """Return quota and period of a speed, in microseconds.

    >>> limit_us(0.45), limit_us(2.0), limit_us(0.05)
    ((4500, 10000), (20000, 10000), (1000, 20000))
    """
    period_us = max(_SHORTEST_PERIOD_US, round(_SMALLEST_QUOTA_US / speed))
    return max(_SMALLEST_QUOTA_US, round(speed * period_us)), period_us


def make_parent(
    name: str, *, mounts: Path = _MOUNTS, own_groups: Path = _OWN_GROUPS
) -> Path | None:
    """Make a group under which groups with quotas can be made; None if nobody lets us.

    It stands as near to this process's own group as it can.
    """
    found = list(places(mounts, own_groups))
    # To enable quotas in a group that is not ours is the second choice.
    for place, enabling in [(place, enabling) for enabling in (False, True) for place in found]:
        parent = place / name
        try:
            os.mkdir(parent)
        except OSError:
            continue
        if _can_limit(parent, enabling=enabling):
            return parent
        with suppress(OSError):
            os.rmdir(parent)
    return None


def places(mounts: Path = _MOUNTS, own_groups: Path = _OWN_GROUPS) -> Iterator[Path]:
    """Yield the groups in which a group with a quota may be made, the nearest first."""
    for line in own_groups.read_text().splitlines() if own_groups.exists() else ():
        _, controllers, own = line.split(":", 2)
        if "cpu" in controllers.split(","):
            mount = mounts / "cpu" if (mounts / "cpu").is_dir() else mounts / controllers
        elif not controllers:
            mount = mounts if (mounts / "cgroup.controllers").exists() else mounts / "unified"
        else:
            continue
        if mount.is_dir():
            here = mount / own.lstrip("/")
            yield from (each for each in (here, *here.parents) if each.is_relative_to(mount))


def _can_limit(parent: Path, *, enabling: bool) -> bool:
    """Whether groups in this one have quotas; in v2 that must be asked for."""
    if (parent / "cpu.cfs_quota_us").exists():
        return True
    try:
        if enabling and not _has_cpu(parent):
            # A group that holds processes refuses, unless it is the root of all.
            (parent.parent / "cgroup.subtree_control").write_text("+cpu")
        if not _has_cpu(parent):
            return False
        (parent / "cgroup.subtree_control").write_text("+cpu")
    except OSError:
        return False
    return True


def _has_cpu(group: Path) -> bool:
    return "cpu" in (group / "cgroup.controllers").read_text().split()
