"""The model as the user knows it, with gradients that are reduced over the workers."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from poise.errors import InvalidSetting
from poise.torch.reduction import Reduction
from poise.torch.run import Run

_OURS = {"module", "process_group", "broadcast_buffers", "forward_sync_buffers"}
_OWN_NAMES = {"module", "_ddp", "_liveness", "_counting", "training"}


class SharedModule(nn.Module):
    """The user's model: same attributes, same state_dict keys; `.module` is the model itself.

    DistributedDataParallel stands between call and model, hidden, so that none of its own
    attributes shadows one of the model's.
    """

    module: nn.Module

    def __init__(self, model: nn.Module, run: Run, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.module = model
        # Gradients live in the buckets: this saves the copy back, as much as our weighting costs.
        settings = {"gradient_as_bucket_view": True, **_no_buffer_broadcast(), **options}
        ddp = DistributedDataParallel(model, process_group=run.cluster.gradients, **settings)
        ddp.register_comm_hook(None, Reduction(run, model).hook)
        counting = _count_backwards(model, run)
        self.__dict__.update(_ddp=ddp, _liveness=run.liveness, _counting=counting)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, preparing the reduction that its backward will do.

        In the second step DistributedDataParallel agrees on new buckets here.
        """
        try:
            return self._ddp(*args, **kwargs)
        except RuntimeError as error:
            self._liveness.raise_if_lost(f"the forward of step {self._liveness.step}", error)
            raise

    def release(self) -> None:
        """Let go of the other workers: from now on this is the model alone."""
        self._counting.remove()
        self.__dict__["_ddp"] = self.module

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


def _count_backwards(model: nn.Module, run: Run) -> RemovableHandle:
    """Count the backwards that reach the model, of which DDP passes some over in silence."""

    def count(_: Tensor) -> None:
        run.backwards += 1

    last = [parameter for parameter in model.parameters() if parameter.requires_grad][-1]
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
