"""What a user may state when a Balancer is made, with what only DistributedDataParallel knows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from poise.runtime.settings import Settings, checked_settings
from poise.torch.ddp_options import check_options
from poise.torch.gradient_sum import InnerHook


@dataclass(frozen=True, kw_only=True)
class TorchSettings(Settings):
    """What the user stated; `Balancer` says what each means."""

    ddp: Mapping[str, Any]
    inner: InnerHook | None


def checked_torch_settings(
    *, ddp: Mapping[str, Any] | None, comm_hook: Any, **stated: Any
) -> TorchSettings:
    """Return the settings, or raise if one cannot be."""
    common = checked_settings(**stated)
    check_options(ddp or {})
    return TorchSettings(**vars(common), ddp=dict(ddp or {}), inner=InnerHook.of(comm_hook))
