"""The model as the user knows it, with gradients that are reduced over the workers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from poise.errors import InvalidSetting, OutOfOrder
from poise.runtime.session import Session
from poise.torch.backwards import Tally, count_backwards
from poise.torch.gloo import raise_if_disconnected
from poise.torch.gradient_sum import GradientSum
from poise.torch.places import Places
from poise.torch.settings import TorchSettings

_OWN_NAMES = {"module", "_link", "training"}
_SHORT = 200
"""Characters of what torch says at length."""


@dataclass
class Link:
    """What ties a model to the other workers."""

    model: nn.Module
    """The user's."""
    ddp: nn.Module
    """DistributedDataParallel around the model; the model itself once released."""
    gradients: GradientSum
    tally: Tally
    counting: RemovableHandle
    session: Session
    alone: bool = False
    """Whether gradients stay on this worker for now: a part of a batch is under way."""

    @staticmethod
    def made(model: nn.Module, session: Session, places: Places, settings: TorchSettings) -> "Link":
        """Wrap a model in DistributedDataParallel, and sum its gradients."""
        # Gradients live in the buckets: this saves the copy back, as much as our weighting costs.
        # Worker 0's buffers are sent here and not again: that would undo the merged statistics.
        options = {"gradient_as_bucket_view": True, "forward_sync_buffers": False, **settings.ddp}
        group = session.generation.gradients
        try:
            ddp = DistributedDataParallel(model, process_group=group, **options)
        except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
            if not settings.ddp:
                raise
            said = str(error).splitlines()[0][:_SHORT]
            raise InvalidSetting(
                f"ddp={dict(settings.ddp)!r} is refused by DistributedDataParallel ({said}); "
                "change these options, or leave them out"
            ) from error
        return Link.adopted(ddp, session, places, settings)

    @staticmethod
    def adopted(
        ddp: DistributedDataParallel, session: Session, places: Places, settings: TorchSettings
    ) -> "Link":
        """Sum the gradients of a DistributedDataParallel that somebody else made.

        It must not have run yet, nor have a communication hook, and broadcast no buffers.
        """
        model, tally = ddp.module, Tally()
        gradients = GradientSum(session, model, tally, places=places, inner=settings.inner)
        ddp.register_comm_hook(None, gradients.hook)
        counting = count_backwards(list(model.parameters()), tally)
        return Link(model, ddp, gradients, tally, counting, session)

    def release(self) -> None:
        """Let go of the other workers: from now on there is the model alone."""
        self.counting.remove()
        self.ddp = self.model


class SharedModule(nn.Module):
    """The user's model: same attributes, same state_dict keys; `.module` is the model itself.

    DistributedDataParallel stands between call and model, hidden, so that none of its own
    attributes shadows one of the model's.
    """

    module: nn.Module
    _link: Link

    def __init__(self, link: Link) -> None:
        super().__init__()
        self.module = link.model
        self.__dict__["_link"] = link

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, preparing the reduction that its backward will do.

        In the second step DistributedDataParallel agrees on new buckets here.
        """
        link = self._link
        if link.alone:
            return self.module(*args, **kwargs)
        try:
            return link.ddp(*args, **kwargs)
        except RuntimeError as error:
            liveness = link.session.peers.liveness
            with liveness.naming(f"the forward of step {liveness.here.step}"):
                raise_if_disconnected(error)
            raise

    def no_sync(self) -> NoReturn:
        """Refuse what DistributedDataParallel offers for accumulating gradients by hand."""
        raise OutOfOrder(
            "no_sync adds up gradients before they are weighted, which is wrong for parts of "
            "unequal size; use `for part in balancer.micro_batches(batch):` and in it "
            "`with part as (x, y):`, which synchronizes once"
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's own state, with the model's own keys. Never communicates."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state of the model, from a run with or without Poise."""
        return self.module.load_state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the model's parameters under their own names."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the model's buffers under their own names."""
        return self.module.named_buffers(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Iterate over the model and its parts under their own names."""
        modules: Iterator[tuple[str, nn.Module]] = self.module.named_modules(*args, **kwargs)
        return modules

    def __getattr__(self, name: str) -> Any:
        if name in _OWN_NAMES:
            return super().__getattr__(name)
        return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN_NAMES or "_link" not in self.__dict__:
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)
