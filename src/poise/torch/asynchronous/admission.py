"""How a server admits workers: it compares what both train, and hosts each in a thread."""

import logging
from collections.abc import Mapping
from contextlib import suppress

from poise import __version__
from poise.core.liveness import Limits
from poise.engine.modes import Async, Stale
from poise.environment import shared_secret
from poise.errors import Disagreement
from poise.runtime.channel import GONE, Channel
from poise.runtime.descriptors import check_descriptors
from poise.runtime.door import Door, check_secret
from poise.runtime.pulse import Pulse
from poise.torch.asynchronous.course import Course, Ending, Failed
from poise.torch.asynchronous.desk import Desk
from poise.torch.asynchronous.flat import Flat
from poise.torch.asynchronous.link import Link
from poise.torch.asynchronous.messages import About, NoMore, about_of
from poise.torch.asynchronous.parameters import everything
from poise.torch.asynchronous.role import ServerRole

_GOODBYE_S = 5.0
_LABEL = 120
"""Characters of a worker's words that are shown."""
_log = logging.getLogger("poise")


class Admission:
    """Lets workers in from the start; they wait until the script gets to its first pass."""

    def __init__(self, role: ServerRole, course: Course, limits: Limits) -> None:
        host, secret = role.serving.host, shared_secret()
        check_secret(host, secret)
        self._mode = role.mode
        self._course = course
        self._hang_s = limits.hang_s
        self._pulse = Pulse(limits)
        self._desk: Desk | None = None
        """Where workers are served; None until the script prepares its training."""
        self._numbers: set[int] = set()
        """Of workers that are here or about to be."""
        self._door = Door(host, role.serving.port, secret, about_of, self._meet)
        self.address = self._door.address

    def open(self, desk: Desk) -> None:
        """Let workers join who were given the same, those that have waited for it and others."""
        with self._course.changing():
            self._desk = desk

    def end(self, said: Ending) -> None:
        """Tell the workers that it ends and why, once, and let go of them."""
        if self._course.ended is not None:
            return
        self._course.end(said)
        if self._desk is not None:
            self._course.await_leaves(_GOODBYE_S)
        self._door.close(_GOODBYE_S)
        self._pulse.end()
        if self._desk is not None:
            self._desk.close()

    def _meet(self, channel: Channel, about: About) -> None:
        """Host a worker, in a thread of its own, until it leaves."""
        link = Link(channel)
        with self._course.changing():
            worker = self._number(about.number)
            self._numbers.add(worker)
        try:
            self._host(worker, link, about)
        except GONE as error:
            _log.info("a connection is closed: %s", error)
            self._say_goodbye(channel)
        except Disagreement as error:
            _log.warning("a worker is refused: %s", error)
            with suppress(*GONE):
                channel.tell({"refused": str(error)})
        except BaseException as error:
            cause = error.__cause__ if isinstance(error, Failed) and error.__cause__ else error
            self._course.fail(cause)
            with suppress(*GONE):
                channel.tell({"failed": f"the server failed: {type(cause).__name__}: {cause}"})
        finally:
            with self._course.changing():
                self._numbers.discard(worker)
            self._pulse.release(channel)
            link.close()

    def _host(self, worker: int, link: Link, about: About) -> None:
        channel = link.channel
        _check_about(about, self._mode)
        channel.set_limit(None)  # its script may take its time until it prepares
        ahead = isinstance(self._mode, Async) and self._mode.ahead
        channel.tell({"worker": worker, "mode": str(self._mode), "ahead": ahead})
        self._pulse.watch(channel, link.cut)
        training = channel.hear()
        desk = self._await_desk(channel)
        _check_facts(desk.given.facts, training.get("facts"))
        check_descriptors()
        channel.set_limit(self._hang_s)
        channel.tell({"accepted": True})
        link.pair_up(server=True)
        self._course.await_first_pass(channel)
        channel.tell({"epoch": self._course.engine.epoch})
        # What is trained comes again, up to date, with the first samples.
        whole = Flat(everything(desk.given.models))
        whole.read(everything(desk.given.models))
        link.send(whole.bytes)
        label = f"{about.host}, {training.get('device')}"[:_LABEL]
        printable = "".join(each if each.isprintable() else "?" for each in label)
        desk.serve(link, worker, printable)

    def _await_desk(self, channel: Channel) -> Desk:
        """Wait until the script has prepared its training, as long as the worker is there."""
        with self._course.changing():
            while self._desk is None:
                self._course.look_after(channel)
            return self._desk

    def _number(self, wanted: int | None) -> int:
        """Return the number that a worker wants, or the first that is free."""
        if wanted is not None and wanted > 0 and wanted not in self._numbers:
            return wanted
        free = range(1, len(self._numbers) + 2)
        return next(number for number in free if number not in self._numbers)

    def _say_goodbye(self, channel: Channel) -> None:
        """Tell a worker whose connection ends with the server why, as far as it can still hear."""
        ended = self._course.ended
        if ended is None:
            return
        said = {"failed": f"the server failed: {ended}"}
        if isinstance(ended, NoMore):
            said = {"refused": "the training is over"}
        with suppress(*GONE):
            channel.tell(said)


def _check_about(about: About, mode: Async | Stale) -> None:
    if about.version != __version__:
        raise Disagreement(
            f"it has Poise {about.version} and the server {__version__}; install the same version"
        )
    if about.mode is not None and about.mode != str(mode):
        raise Disagreement(f'its script says mode="{about.mode}" and the server has "{mode}"')


def _check_facts(expected: Mapping[str, str], found: object) -> None:
    """Raise where a worker's facts differ from the server's."""
    if not isinstance(found, dict):
        raise Disagreement("it says nothing of its model and data")
    for key in [*expected, *(key for key in found if key not in expected)]:
        if expected.get(key) != found.get(key):
            raise Disagreement(
                f"{key} is {found.get(key, 'missing')} there and {expected.get(key, 'missing')} "
                "on the server; run the same script with the same settings and data"
            )
