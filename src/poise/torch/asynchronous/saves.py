"""Where a served training stands, and the file from which a server that is lost goes on."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from poise.errors import InvalidSetting, PoiseError, StateMismatch
from poise.runtime.training import Saved, Schedule
from poise.torch.asynchronous.course import Course
from poise.torch.asynchronous.facts import Given
from poise.torch.asynchronous.save_file import SaveFile
from poise.torch.torch_private import has_scheduler

_VERSION = 1
_SHORT = 200
"""Characters of what torch says at length."""
_log = logging.getLogger("poise")


class Saves:
    """Saves and restores a training: its place, and to a file everything."""

    def __init__(self, course: Course, given: Given, path: Path | None) -> None:
        """Go on from the file, if there is one; None: nothing is written."""
        self._course = course
        self._given = given
        self._file = None if path is None else SaveFile(path)
        self._identity: Saved = {
            "version": f"asynchronous {_VERSION}",
            "mode": str(course.engine.mode),
            "seed": given.settings.seed,
            "global_batch": given.settings.global_batch,
            **given.orders.identity(),
        }
        self._schedules: list[Schedule] = []
        self._saved_schedules: list[Any] = []
        """Of a restart, until the script makes the schedules that they are of."""
        self._saved_optimizer: Saved = {}
        """The same, since a schedule that is made changes rates."""
        if path is not None and path.exists():
            self._restore(path)

    def state_dict(self) -> Saved:
        """Return the place in the training, and what was learned of the workers."""
        with self._course.still():
            place = self._course.engine.state_dict()
        drawn = self._given.orders.drawn(place["epoch"]) if place["position"] else ""
        return {**self._identity, **place, "drawn": drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved place, or raise if it is another training's."""
        for key, value in self._identity.items():
            if state.get(key) != value:
                raise StateMismatch(
                    f"the state has {key}={state.get(key)!r} and this training {key}={value!r}; "
                    "resume with the mode, data set, shuffling and seed it was saved with"
                )
        loaded = self._course.engine.load_state_dict(state)
        self._given.orders.expect(loaded.epoch, loaded.pool.position, state.get("drawn", ""))
        self._course.resume(loaded)

    def add(self, schedule: Schedule) -> None:
        """Save a schedule, too; after a restart it goes on from where it was."""
        if self._saved_schedules:
            schedule.load_state_dict(self._saved_schedules.pop(0))
            self._given.optimizer.load_state_dict(self._saved_optimizer)
        self._schedules.append(schedule)

    def begin(self) -> None:
        """A pass begins, before which a script has made its schedules.

        Raises for one that a restart would begin anew, without a word.
        """
        if self._file is not None and has_scheduler(self._given.optimizer) and not self._schedules:
            raise InvalidSetting(
                "the optimizer has a scheduler that --save does not know, so that a restart would "
                "begin it anew; wrap it in BySamples, with the samples of an epoch as "
                "samples_per_step if it is to step once per epoch, or save in the script instead"
            )
        self._saved_schedules, self._saved_optimizer = [], {}

    def save(self) -> None:
        """Write everything to a file that is complete at any time, if there is to be one."""
        if self._file is None:
            return
        with self._course.still():
            if self._course.broken:
                return
            self._file.write(
                {
                    "models": [model.state_dict() for model in self._given.models],
                    "optimizer": self._given.optimizer.state_dict(),
                    "schedules": [schedule.state_dict() for schedule in self._schedules],
                    "balancer": self.state_dict(),
                }
            )

    def close(self) -> None:
        """Say what is not saved."""
        if self._file is not None:
            self._file.close()

    def _restore(self, path: Path) -> None:
        try:
            state = torch.load(path, weights_only=True, map_location="cpu")
            for model, saved in zip(self._given.models, state["models"], strict=True):
                model.load_state_dict(saved)
            self._given.optimizer.load_state_dict(state["optimizer"])
            self._saved_optimizer = state["optimizer"]
            self._saved_schedules = list(state["schedules"])
            self.load_state_dict(state["balancer"])
        except PoiseError:
            raise
        except Exception as error:
            said = next(iter(str(error).splitlines()), type(error).__name__)[:_SHORT]
            raise StateMismatch(
                f"{path} does not fit this training, or is damaged ({said}); move it away to start "
                "anew"
            ) from error
        _log.info("going on from %s, epoch %d", path, self._course.engine.epoch)
