"""What a user may state when a Balancer is made, with what only DistributedDataParallel knows."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from poise.runtime.settings import Settings, as_held
from poise.torch.ddp_options import check_options
from poise.torch.gradient_sum import InnerHook


@dataclass(frozen=True, kw_only=True)
class TorchSettings(Settings):
    """What the user stated; `Balancer` says what each means."""

    ddp: Mapping[str, Any] = field(default_factory=dict)
    inner: InnerHook | None = None

    @staticmethod
    def of(ddp: Mapping[str, Any] | None, comm_hook: Any, **stated: Any) -> "TorchSettings":
        """Return what a user states, or raise if it cannot be."""
        check_options(ddp or {})
        inner = InnerHook.of(comm_hook)
        return TorchSettings(**as_held(**stated), ddp=dict(ddp or {}), inner=inner)
