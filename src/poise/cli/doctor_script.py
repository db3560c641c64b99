"""Run a user's training script until its Balancer is prepared, and examine it there."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from poise.cli.doctor_facts import Examination
from poise.cli.doctor_worker import examine
from poise.errors import InvalidSetting
from poise.script import check_script, run
from poise.torch.balancer import Balancer
from poise.torch.loader import lead


def examine_script(script: Sequence[str]) -> Examination | None:
    """Run a script, given with its arguments, up to prepare. None except on worker 0."""
    check_script(script)
    with _stop_after_prepare():
        try:
            run(script)
            ending = "ended"
        except _Prepared as prepared:
            return prepared.examination
        except SystemExit as left:
            ending = f"called sys.exit({'' if left.code is None else repr(left.code)})"
        finally:
            if dist.is_initialized():  # the script's own group, which it can no longer destroy
                dist.destroy_process_group()
    raise InvalidSetting(
        f"{script[0]} {ending} without calling Balancer.prepare, where doctor looks at the "
        "loader; give a script, and arguments, that train with a Balancer"
    )


class _Prepared(BaseException):
    """Leaves the script; no `except Exception` of the script catches it."""

    def __init__(self, examination: Examination | None) -> None:
        super().__init__("poise doctor has seen enough")
        self.examination = examination


@contextmanager
def _stop_after_prepare() -> Iterator[None]:
    """Let Balancer.prepare do its work, examine the group, and leave the script."""
    original = Balancer.prepare

    def prepare(
        self: Balancer, model: nn.Module, optimizer: Optimizer, loader: DataLoader[Any]
    ) -> Any:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            original(self, model, optimizer, loader)
        texts = [str(warning.message) for warning in caught]
        examination = examine(self._synchronous._cluster, lead(loader), texts)
        self.close()
        raise _Prepared(examination)

    setattr(Balancer, "prepare", prepare)  # noqa: B010 (mypy forbids to assign to a method)
    try:
        yield
    finally:
        setattr(Balancer, "prepare", original)  # noqa: B010
