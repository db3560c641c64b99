"""What a user may state when a Balancer is made, with what only DistributedDataParallel knows."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from poise.errors import InvalidSetting
from poise.runtime.settings import Settings, as_held
from poise.torch.gradient_sum import InnerHook

_OURS = {"module", "process_group", "broadcast_buffers", "forward_sync_buffers"}
"""Options of DistributedDataParallel that are not the user's to set."""


@dataclass(frozen=True, kw_only=True)
class TorchSettings(Settings):
    """What the user stated; `Balancer` says what each means."""

    ddp: Mapping[str, Any] = field(default_factory=dict)
    inner: InnerHook | None = None

    @staticmethod
    def of(ddp: Mapping[str, Any] | None, comm_hook: Any, **stated: Any) -> "TorchSettings":
        """Return what a user states, or raise if it cannot be."""
        if not isinstance(ddp, Mapping | None) or not all(
            isinstance(name, str) for name in ddp or ()
        ):
            raise InvalidSetting(
                f"ddp={ddp!r} are no options of DistributedDataParallel; give names and values, "
                'such as {"bucket_cap_mb": 10}'
            )
        options = dict(ddp or {})
        _check_options(options)
        return TorchSettings(**as_held(**stated), ddp=options, inner=InnerHook.of(comm_hook))


def _check_options(options: Mapping[str, Any]) -> None:
    """Raise unless these options of DistributedDataParallel are the user's to set."""
    ours = sorted(_OURS & set(options))
    if ours:
        raise InvalidSetting(f"ddp={{...}} sets {ours}, which Poise sets itself; leave them out")
    unknown = sorted(set(options) - set(inspect.signature(DistributedDataParallel).parameters))
    if unknown:
        raise InvalidSetting(
            f"ddp={{...}} has {unknown}, which DistributedDataParallel does not know; "
            "use its own argument names"
        )
