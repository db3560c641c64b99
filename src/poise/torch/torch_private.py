"""Every private name of torch that Poise uses, and nowhere else.

Each has a test that fails when torch changes it (tests/test_torch_private.py).
"""

from typing import Any

from torch.distributed import Store, distributed_c10d
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.utils.data import DataLoader

__all__ = ["BatchNormBase", "NormBase", "default_store", "with_batch_sampler"]


def default_store() -> Store:
    """Return the store of the default group; there is no public name for it."""
    store: Store = distributed_c10d._get_default_store()
    return store


def with_batch_sampler(loader: DataLoader[Any], batch_sampler: Any) -> DataLoader[Any]:
    """Have a loader of a stream take batches of changing size.

    DataLoader refuses that for streams, though its fetcher takes as many samples as it is asked
    for.
    """
    object.__setattr__(loader, "batch_sampler", batch_sampler)
    return loader
