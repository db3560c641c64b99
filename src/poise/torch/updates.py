"""What happens around the steps of the user's optimizers."""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from poise.errors import OutOfOrder
from poise.runtime.checks import check_backwards, check_parts_ended, check_parts_used
from poise.runtime.events import Applying
from poise.runtime.session import Session
from poise.torch.micro import MicroBatches
from poise.torch.module import Link
from poise.torch.rates import Ramp, Rates


class Updates:
    """Tells of updates, sees that each uses a whole gradient, and lets learning rates follow."""

    def __init__(
        self,
        session: Session,
        optimizers: Sequence[Optimizer],
        links: Sequence[Link],
        micro: MicroBatches | None = None,
        most_samples: int | None = None,
    ) -> None:
        """Put hooks around the optimizers' steps.

        Args:
            session: the training.
            optimizers: the user's.
            links: of the models that they train.
            micro: cuts batches into parts, if anything does.
            most_samples: of one part, if the user stated that.
        """
        self._session = session
        self._links = links
        self._trained = trained(links)
        self._micro = micro
        self._most_samples = most_samples
        self._rates: list[Rates] = []
        """One for each optimizer, if the global batch may move."""
        self._hooks: list[RemovableHandle] = []
        settings = session.settings
        for each in optimizers:
            self._hooks.append(each.register_step_post_hook(self._after_step))
            if session.events.heard(Applying):
                self._hooks.append(each.register_step_pre_hook(self._before_step))
            if settings.adapt is not None:
                rates = Rates(each, settings.rule, settings.global_batch, lambda: session.plan)
                self._rates.append(rates)
                self._hooks += rates.hooks()

    @property
    def learning_rate_factor(self) -> float:
        """What the last step's learning rate was multiplied by, in the first parameter group."""
        return self._rates[0].factor if self._rates else 1.0

    @property
    def saved(self) -> list[list[dict[str, Any]]]:
        """How far changes of the learning rates have come, as plain values."""
        return [each.saved() for each in self._rates]

    def resume(self, ramps: Sequence[Sequence[Ramp]]) -> None:
        """Go on with changes of the learning rates that `saved_ramps` read."""
        for rates, way in zip(self._rates, ramps, strict=False):
            rates.resume(way)

    def release(self) -> None:
        """Let go of the optimizers."""
        for hook in self._hooks:
            hook.remove()
        for rates in self._rates:
            rates.restore()

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._session.events.tell(self._session.stamped(Applying, optimizer))

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        try:
            if self._micro is not None:
                check_parts_ended(unfinished=self._micro.unfinished)
            for link in self._links:
                check_backwards(link.tally.backwards, link.tally.reduced)
            self._session.applied(optimizer)
            if self._micro is not None and self._most_samples is not None:
                used = self._micro.last is self._session.progress.batch
                check_parts_used(self._most_samples, used=used)
        except OutOfOrder:
            if any(not parameter.requires_grad for parameter in self._trained):
                raise OutOfOrder(
                    "some parameters were frozen after prepare, and DistributedDataParallel "
                    "waits for their gradients; freeze them before, or use "
                    'Balancer(..., ddp={"find_unused_parameters": True})'
                ) from None
            raise


def trained(links: Sequence[Link]) -> list[nn.Parameter]:
    """Return what models have to train now."""
    return [p for link in links for p in link.model.parameters() if p.requires_grad]
