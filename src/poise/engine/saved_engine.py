"""What an engine saved, read again: every number can be what it says, and they go together."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from poise.core.limits import UNLIMITED
from poise.core.plain import from_plain
from poise.core.split import Split, check_split
from poise.engine.adaptation import AdaptationState
from poise.errors import StateMismatch
from poise.numbers import check_whole

_MOST_WORKERS = 10**6


@dataclass(frozen=True)
class SavedEngine:
    """A saved engine, of which the policy has yet to read its own part."""

    workers: int
    global_batch: int
    start_batch: int
    policy: Any
    adapted: Any
    split: Split | None

    @staticmethod
    def of(state: Mapping[str, Any]) -> "SavedEngine":
        """Read what `Engine.state_dict` returned, or raise StateMismatch."""
        return from_plain(SavedEngine, state, "engine")

    def check_loaded(self) -> None:
        """Raise unless the numbers go together."""
        check_whole("the engine", "workers", self.workers, 1, _MOST_WORKERS)
        for name in ("global_batch", "start_batch"):
            check_whole("the engine", name, getattr(self, name), 1, UNLIMITED)
        if self.split:
            check_split(self.split, self.workers, self.global_batch)

    def learned(self, kind: type) -> Any:
        """Return the policy's state, or raise; one that has a split has the engine's."""
        found: Any = from_plain(kind, self.policy, f"state of a policy ({kind.__name__})")
        split = getattr(found, "split", None)
        if split is None:
            return found
        right = (len(split), sum(split)) == (self.workers, self.global_batch)
        if not right or (self.split and self.split != split):
            raise StateMismatch(
                f"the policy of a saved engine has split={list(split)}, and the engine has "
                f"workers={self.workers}, global_batch={self.global_batch} and "
                f"split={list(self.split or ())}; it is damaged, load another one"
            )
        return found

    def adaptation(self) -> AdaptationState | None:
        """Return what is known of the noise, or raise; None: nothing is."""
        if self.adapted is None:
            return None
        return from_plain(AdaptationState, self.adapted, "adapted state")
