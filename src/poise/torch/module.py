"""The model as the user knows it, with gradients that are reduced over the workers."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from poise.errors import InvalidSetting, OutOfOrder
from poise.torch.liveness import Liveness
from poise.torch.reduction import InnerHook, Reduction
from poise.torch.run import Run, Tally

_OURS = {"module", "process_group", "broadcast_buffers", "forward_sync_buffers"}
_OWN_NAMES = {"module", "_link", "training"}


@dataclass
class Link:
    """What ties a model to the other workers."""

    ddp: nn.Module
    """DistributedDataParallel around the model; the model itself once released."""
    reduction: Reduction
    tally: Tally
    counting: RemovableHandle
    liveness: Liveness
    alone: bool = False
    """Whether gradients stay on this worker for now: a part of a batch is under way."""


class SharedModule(nn.Module):
    """The user's model: same attributes, same state_dict keys; `.module` is the model itself.

    DistributedDataParallel stands between call and model, hidden, so that none of its own
    attributes shadows one of the model's.
    """

    module: nn.Module
    _link: Link

    def __init__(
        self,
        model: nn.Module,
        run: Run,
        options: Mapping[str, Any],
        inner: InnerHook | None = None,
    ) -> None:
        super().__init__()
        self.module = model
        # Gradients live in the buckets: this saves the copy back, as much as our weighting costs.
        settings = {"gradient_as_bucket_view": True, **_no_buffer_broadcast(), **options}
        ddp = DistributedDataParallel(model, process_group=run.cluster.gradients, **settings)
        tally = Tally()
        run.tallies.append(tally)
        run.parameters.extend(model.parameters())
        reduction = Reduction(run, model, tally, inner)
        ddp.register_comm_hook(None, reduction.hook)
        counting = count_backwards(list(model.parameters()), tally)
        self.__dict__["_link"] = Link(ddp, reduction, tally, counting, run.liveness)

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
            link.liveness.raise_if_lost(f"the forward of step {link.liveness.step}", error)
            raise

    def no_sync(self) -> NoReturn:
        """Refuse what DistributedDataParallel offers for accumulating gradients by hand."""
        raise OutOfOrder(
            "no_sync adds up gradients before they are weighted, which is wrong for parts of "
            "unequal size; use `for part in balancer.micro_batches(batch):` and in it "
            "`with part as (x, y):`, which synchronizes once"
        )

    def release(self) -> None:
        """Let go of the other workers: from now on this is the model alone."""
        self._link.counting.remove()
        self._link.ddp = self.module

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
        if name in _OWN_NAMES or "module" not in self.__dict__.get("_modules", {}):
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)


def count_backwards(parameters: Sequence[nn.Parameter], tally: Tally) -> RemovableHandle:
    """Count the backwards that reach a model, of which DDP passes some over in silence."""

    def count(_: Tensor) -> None:
        tally.backwards += 1

    last = [parameter for parameter in parameters if parameter.requires_grad][-1]
    handle: RemovableHandle = last.register_post_accumulate_grad_hook(count)
    return handle


def check_options(options: Mapping[str, Any]) -> None:
    """Raise unless these options of DistributedDataParallel are the user's to set."""
    ours = sorted(_OURS & set(options))
    if ours:
        raise InvalidSetting(f"ddp={{...}} sets {ours}, which Poise sets itself; leave them out")
    known = set(inspect.signature(DistributedDataParallel).parameters)
    unknown = sorted(set(options) - known)
    if unknown:
        raise InvalidSetting(
            f"ddp={{...}} has {unknown}, which DistributedDataParallel does not know; "
            "use its own argument names"
        )


def _no_buffer_broadcast() -> dict[str, Any]:
    """Turn off DDP's broadcast of worker 0's buffers: it would undo the merged statistics."""
    parameters = inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in parameters else "broadcast_buffers"
    return {name: False}
