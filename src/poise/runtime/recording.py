"""The record of a training: a subscriber that writes what worker 0 decides on."""

from os import PathLike

from poise.engine.bsp import Engine
from poise.records import Recorder
from poise.runtime.events import Closed, Decided, Events, Resumed


class Recording:
    """Writes a record, from the first decision to the end."""

    def __init__(self, path: str | PathLike[str], engine: Engine) -> None:
        self._recorder = Recorder(path, engine, series=True)

    def listen(self, events: Events) -> None:
        """Hear of decisions."""
        events.on(Decided, self._decided)
        events.on(Resumed, self._resumed)
        events.on(Closed, self._closed)

    def _decided(self, event: Decided) -> None:
        self._recorder.write(event.observations, event.start_step, event.plan)

    def _resumed(self, event: Resumed) -> None:
        if event.engine is not None:
            self._recorder.resume(event.engine, event.change, event.start_step, event.plan)

    def _closed(self, _: Closed) -> None:
        self._recorder.close()
