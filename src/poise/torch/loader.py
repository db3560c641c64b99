"""A DataLoader of this worker's share of each batch."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from poise.errors import OutOfOrder
from poise.runtime.batches import Cut, Source
from poise.runtime.settings import Settings
from poise.runtime.slicing import Slicer, emptied
from poise.torch.seeding import SeededDataset, Wanted

_END = object()


class ShareLoader:
    """A DataLoader that yields one worker's share of each batch."""

    def __init__(self, loader: DataLoader[Any], source: Source, settings: Settings) -> None:
        self.dataset = loader.dataset
        self._source = source
        self._slicer = settings.slicer
        self._passes = 0
        self._cut: deque[Cut] = deque()
        self._loader = DataLoader(
            SeededDataset(loader.dataset, settings.seed),
            batch_sampler=PerPass(self._wanted),
            collate_fn=loader.collate_fn,
            worker_init_fn=loader.worker_init_fn,
            **settings_kept(loader),
        )

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Iterator[Any]:
        self._passes += 1
        this_pass = self._passes
        self._cut = deque()
        fetching = iter(self._loader)
        while True:
            with self._source.loading():
                collated = next(fetching, _END)
            if collated is _END:
                break
            if this_pass != self._passes:
                raise OutOfOrder("this pass over the loader ended when another one began")
            # Batches arrive in the order in which they were cut, however far ahead that was.
            cut = self._cut.popleft()
            contents = without_samples(collated, self._slicer) if cut.emptied else collated
            self._source.hand_out(cut.batch, contents)
            yield contents
        self._source.end()

    def _wanted(self) -> Iterator[Wanted]:
        """Cut the batches of a pass; runs ahead of the yields by the loader's lead."""
        cut = self._cut
        for each in self._source.begin():
            cut.append(each)
            yield Wanted(each.epoch, each.samples)


class PerPass:
    """A batch sampler that starts anew in every pass."""

    def __init__(self, passes: Callable[[], Iterator[Any]]) -> None:
        self._passes = passes

    def __iter__(self) -> Iterator[Any]:
        return self._passes()


def lead(loader: DataLoader[Any]) -> int:
    """Return how many steps a loader cuts ahead of the one it yields."""
    return loader.num_workers * (loader.prefetch_factor or 0)


def without_samples(batch: Any, slicer: Slicer | None) -> Any:
    """Return a batch of the same form with no sample in it."""
    return emptied(batch) if slicer is None else slicer(batch, 0, 0)


def settings_kept(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the settings of a user's loader that hold for ours as they are."""
    return {
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "pin_memory_device": loader.pin_memory_device,
        "timeout": loader.timeout,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": loader.generator,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
    }
