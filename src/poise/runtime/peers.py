"""The other workers: what is sized by their number, and built anew from each generation."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from poise.core.liveness import Limits
from poise.runtime.clocks import Waits
from poise.runtime.control import Control
from poise.runtime.counts import CountFunction, Counts
from poise.runtime.events import Events, HandedOut
from poise.runtime.generation import Generation, Member
from poise.runtime.liveness import Liveness
from poise.runtime.rendezvous import Rendezvous


@dataclass(eq=False)
class Peers:
    """Who is there, whether they live, and what they say to each other."""

    generation: Generation
    rendezvous: Rendezvous
    events: Events
    waits: Waits
    count: CountFunction | None
    limits: Limits = field(default_factory=Limits)
    liveness: Liveness = field(init=False)
    control: Control = field(init=False)
    counts: Counts = field(init=False)

    def __post_init__(self) -> None:
        self._build(self.generation)
        self.events.on(HandedOut, self._handed_out)

    def meet(self, generation: Generation) -> None:
        """Go on with those of another generation."""
        self.liveness.end()
        self._build(generation)

    def leave(self, disconnect: Callable[[], None]) -> None:
        """Let go of the connections, also of those that the adapter holds: the others see that."""
        with self.liveness.leaving():
            self.generation.collectives.close()
            self.generation = replace(self.generation, gradients=None)
            disconnect()
        self.liveness.leave()

    def introduce(self, me: Member) -> int:
        """Have everybody know all members; return how many of them share this one's host.

        All workers call it together.
        """
        texts = self.control.texts(json.dumps(me), "prepare")
        members = tuple(Member(*json.loads(text)) for text in texts)
        self.generation = replace(self.generation, members=members)
        return sum(member.host == me.host for member in members)

    def _build(self, generation: Generation) -> None:
        self.generation = generation
        self.liveness = Liveness(generation, self.rendezvous, self.waits, self.events, self.limits)
        self.control = Control(generation.collectives, self.liveness)
        self.counts = Counts(generation.collectives, self.liveness, self.count)

    def _handed_out(self, event: HandedOut) -> None:
        self.liveness.here.step = event.step
