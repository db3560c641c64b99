"""What this machine lets tests do: quotas, namespaces, disks that are full."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from poise.errors import InvalidSetting
from poise.lab import Quota
from poise.lab.leftovers import lab_name
from poise.lab.network import check_privileges
from poise.lab.quota import make_parent


def quotas_work() -> bool:
    parent = make_parent(lab_name(99))
    if parent is not None:
        Quota(parent).remove()
    return parent is not None


def namespaces_work() -> bool:
    try:
        check_privileges()
    except InvalidSetting:
        return False
    return True


needs_quotas = pytest.mark.skipif(not quotas_work(), reason="no control group can be made here")
needs_namespaces = pytest.mark.skipif(not namespaces_work(), reason="needs root and iproute2")


def _mounts_work() -> bool:
    with TemporaryDirectory() as folder:
        mounting = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder]
        try:
            worked = subprocess.run(mounting, capture_output=True, check=False).returncode == 0
        except OSError:
            return False
        if worked:
            subprocess.run(["umount", folder], check=True)
        return worked


needs_mounts = pytest.mark.skipif(not _mounts_work(), reason="no file system can be mounted here")


class SmallDisk:
    """A file system of a few kilobytes, which can be filled up and freed."""

    def __init__(self, path: Path, kilobytes: int) -> None:
        self.path = path
        self._ballast = path / "ballast"
        size = f"size={kilobytes}k"
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(path)], check=True)

    def fill(self) -> None:
        """Leave no room at all."""
        with self._ballast.open("ab", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))

    def free(self) -> None:
        """Make room again."""
        self._ballast.unlink()

    def remount(self, how: str) -> None:
        """Make it read-only (ro), or not (rw)."""
        subprocess.run(["mount", "-o", f"remount,{how}", str(self.path)], check=True)

    def close(self) -> None:
        """Take it away, though somebody may still use it."""
        subprocess.run(["umount", "-l", str(self.path)], check=True)


@contextmanager
def small_disk(path: Path, kilobytes: int = 64) -> Iterator[SmallDisk]:
    """A small disk that is gone afterwards."""
    path.mkdir()
    disk = SmallDisk(path, kilobytes)
    try:
        yield disk
    finally:
        disk.close()
