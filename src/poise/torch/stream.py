"""A DataLoader of a stream: an IterableDataset of which every worker reads its own part."""

from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, get_worker_info

from poise.errors import InvalidSetting
from poise.runtime.batches import StreamBatches
from poise.runtime.slicing import Slicer
from poise.torch.loader import PerPass, settings_kept, without_samples
from poise.torch.torch_private import with_batch_sampler


class StreamLoader:
    """A DataLoader that yields this worker's part of a stream, by the sizes of its plan."""

    def __init__(
        self, loader: DataLoader[Any], batches: StreamBatches, slicer: Slicer | None
    ) -> None:
        self.dataset = loader.dataset
        self._users = loader
        self._batches = batches
        self._slicer = slicer
        self._starts: dict[int, Any] = {}
        """Where each loader process is to start in the first pass after a resume."""
        self._resumed = False
        self._left = False
        """Whether a pass has begun and not come to its end."""
        self._beginning = deepcopy(_state_of(self.dataset))
        self._loader = self._made()
        self.states: dict[int, Any] = {}
        """Where each loader process stands after the last batch handed out, if it can say."""
        self.states_before: dict[int, Any] = {}
        """The same, before that batch."""

    def __len__(self) -> int:
        raise TypeError("a stream has no length: it is over when every worker's part is")

    def __iter__(self) -> Iterator[Any]:
        resumed, self._resumed = self._resumed, False
        if not resumed:
            self._begin_anew()
        epoch = self._batches.begin(resumed=resumed)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        self._left = True
        fetching = iter(self._loader)
        self._starts.clear()
        form: Any = None
        exhausted = False
        while True:
            with self._batches.loading():
                fetched: Fetched | None = None if exhausted else next(fetching, None)
            exhausted = fetched is None
            batch = self._batches.agreed(0 if fetched is None else fetched.samples)
            if batch is None:
                break
            self.states_before = dict(self.states)
            if fetched is None:
                form = self._form() if form is None else form
                contents = without_samples(form, self._slicer)
            else:
                contents = form = fetched.contents
                if fetched.state is not None:
                    self.states[fetched.process] = fetched.state
            self._batches.hand_out(batch, contents)
            yield contents
        self.states, self.states_before = {}, {}
        self._left = False
        self._batches.end()

    def resume(self, states: dict[int, Any]) -> None:
        """Let the next pass go on where each loader process stood."""
        if self._users.num_workers == 0 and 0 in states:
            self.dataset.load_state_dict(states[0])  # type: ignore[attr-defined]
        self.states, self.states_before = dict(states), dict(states)
        self._starts = dict(states)
        self._resumed = True
        self._loader = self._made()

    def _begin_anew(self) -> None:
        """Start at the beginning, also where the data set itself would go on."""
        self.states, self.states_before = {}, {}
        if self._left and self._users.num_workers == 0 and self._beginning is not None:
            self.dataset.load_state_dict(deepcopy(self._beginning))  # type: ignore[attr-defined]

    def _form(self) -> Any:
        """Return a batch of one sample, to show the form of one without.

        Needed when a pass begins after the end of this worker's part: in a resumed one, a sample
        from the beginning serves.
        """
        if hasattr(self.dataset, "state_dict"):
            place = self.dataset.state_dict()
            sample = next(iter(self.dataset), None)
            self.dataset.load_state_dict(place)  # type: ignore[attr-defined]
            if sample is not None:
                return self._users.collate_fn([sample])
        raise InvalidSetting(
            f"worker {self._batches.worker}'s part of the stream has no sample at all, so no "
            "empty batch of its form can be made; give every worker at least one sample"
        )

    def _made(self) -> DataLoader[Any]:
        loader = DataLoader(
            self._users.dataset,
            batch_size=1,
            drop_last=self._users.drop_last,
            collate_fn=partial(_collated, self._users.collate_fn, self._users.dataset),
            worker_init_fn=partial(_started, self._users.worker_init_fn, self._starts),
            **settings_kept(self._users),
        )
        return with_batch_sampler(loader, PerPass(self._asked))

    def _asked(self) -> Iterator[list[int]]:
        """Ask for each step's samples; what they are called does not matter."""
        return ([0] * samples for samples in self._batches.asked())


class Fetched(NamedTuple):
    """What a loader process sends."""

    samples: int
    process: int
    """Number of the loader process; 0 in the worker itself."""
    state: Any
    """Where its copy of the data set stands now; None if it cannot say."""
    contents: Any


def _collated(collate: Any, dataset: Any, samples: list[Any]) -> Fetched:
    """Return what the user's collate_fn makes, and what is known only where it runs."""
    process = get_worker_info()
    state = _state_of(dataset if process is None else process.dataset)
    if process is None:  # nothing pickles the state here, and the data set may go on using it
        return Fetched(len(samples), 0, deepcopy(state), collate(samples))
    return Fetched(len(samples), process.id, state, collate(samples))


def _started(init: Any, starts: dict[int, Any], process: int) -> None:
    """Call the user's worker_init_fn; in the first pass after a resume, also set the place."""
    if init is not None:
        init(process)
    if process in starts:
        info = get_worker_info()
        assert info is not None
        info.dataset.load_state_dict(starts[process])  # type: ignore[attr-defined]


def _state_of(dataset: Any) -> Any:
    """Return where a data set stands; None if it cannot say."""
    return dataset.state_dict() if hasattr(dataset, "state_dict") else None
