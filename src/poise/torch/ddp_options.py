"""Options of DistributedDataParallel: which are the user's to set, and which are ours."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from poise.errors import InvalidSetting

_OURS = {"module", "process_group", "broadcast_buffers", "forward_sync_buffers"}


def check_options(options: Mapping[str, Any]) -> None:
    """Raise unless these options are the user's to set."""
    ours = sorted(_OURS & set(options))
    if ours:
        raise InvalidSetting(f"ddp={{...}} sets {ours}, which Poise sets itself; leave them out")
    unknown = sorted(set(options) - _known())
    if unknown:
        raise InvalidSetting(
            f"ddp={{...}} has {unknown}, which DistributedDataParallel does not know; "
            "use its own argument names"
        )


def _known() -> set[str]:
    return set(inspect.signature(DistributedDataParallel).parameters)
