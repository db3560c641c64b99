"""Whether all workers are at the same place, looked at once in each pass over the loader."""

import torch
import torch.distributed as dist

from poise.core.batch import Batch
from poise.errors import Disagreement
from poise.runtime.events import PassBegan
from poise.runtime.session import Session
from poise.torch.gloo import disconnecting


class Places:
    """Compares the places of all workers, in the group that sums their gradients."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.compared = False
        """Whether that was done since the pass began."""
        session.events.on(PassBegan, self._begin)

    def compare(self, batch: Batch, device: torch.device) -> None:
        """Raise unless all workers are at the same place."""
        place = torch.tensor([batch.epoch, batch.start, batch.step], device=device)
        extremes = torch.cat([place, -place])
        doing = f"the reduction of step {batch.step}"
        with self._session.peers.liveness.watch(doing), disconnecting():
            group = self._session.generation.gradients
            dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
        largest, smallest = extremes.view(2, -1).tolist()
        for name, high, low in zip(("epoch", "position", "step"), largest, smallest, strict=True):
            if high != -low:
                raise Disagreement(
                    f"workers are at different places: {name} {-low} on one, {high} on another; "
                    "load the same state on every worker and let all take the same steps"
                )
        self.compared = True

    def _begin(self, _: PassBegan) -> None:
        self.compared = False
