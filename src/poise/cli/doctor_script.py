"""Run a user's training script until its Balancer is prepared, and examine it there."""

import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist

from poise.cli.doctor_facts import Examination
from poise.cli.doctor_worker import examine
from poise.errors import InvalidSetting
from poise.runtime.events import Begun, Events, Prepared, Preparing
from poise.runtime.instruments import Instrument, instrumented
from poise.script import check_script, run


def examine_script(script: Sequence[str]) -> Examination | None:
    """Run a script, given with its arguments, up to prepare. None except on worker 0."""
    check_script(script)
    stop = _Stop()
    with instrumented(Instrument(listen=stop.listen)), stop.catching:
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


class _Stop:
    """Lets Balancer.prepare do its work, examines the group, and leaves the script."""

    def __init__(self) -> None:
        self.catching = ExitStack()
        """Ends the catching of warnings."""
        self._caught: list[warnings.WarningMessage] = []

    def listen(self, events: Events) -> None:
        """Hear of a training."""
        made: list[Any] = []
        events.on(Begun, lambda event: made.append(event.balancer))
        events.on(Preparing, self._preparing)
        events.on(Prepared, lambda event: self._prepared(event, made[0]))

    def _preparing(self, _: Preparing) -> None:
        catching = warnings.catch_warnings(record=True)
        self._caught = self.catching.enter_context(catching) or []
        warnings.simplefilter("always")

    def _prepared(self, event: Prepared, balancer: Any) -> None:
        self.catching.close()
        if event.peers is None:
            raise InvalidSetting(
                "doctor looks at workers that train together, and this script trains with a "
                'server; run it with mode="sync", without POISE_SERVER'
            )
        texts = [str(warning.message) for warning in self._caught]
        device = next(event.models[0].parameters()).device
        examination = examine(event.peers, device, event.lead, texts)
        balancer.close()
        raise _Prepared(examination)
