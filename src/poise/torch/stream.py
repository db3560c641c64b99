"""Loaders of streams: an IterableDataset of which every worker reads its own part.

Nobody knows beforehand how many samples a part has. So each worker takes as many as its plan
says, or as are left, and the workers tell each other how many that were: these are the counts of
the step. A worker whose part is exhausted goes on with weight 0 until all are.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from itertools import count
from typing import Any, NamedTuple, Protocol

from torch.utils.data import DataLoader, get_worker_info

from poise.core.batch import Batch
from poise.core.plan import Plan
from poise.errors import InvalidSetting
from poise.torch.control import Control
from poise.torch.exchange import Exchange
from poise.torch.loader import PerPass, settings_kept, without_samples
from poise.torch.run import Run
from poise.torch.slicing import Slicer


class Pace(Protocol):
    """How many samples each step of a stream takes, and what is noted of it."""

    def begin(self, *, resumed: bool) -> tuple[int, int, int]:
        """Start a pass; return its epoch, and the step and position at which it starts.

        Unless it is resumed, a stream starts at its beginning, and so does the epoch.
        """

    def plan_at(self, step: int) -> Plan:
        """Return the plan of a step that is about to be asked for."""

    def loading(self) -> AbstractContextManager[None]:
        """Surround the fetching of a batch."""

    def hand_out(self, batch: Batch, contents: Any) -> None:
        """A batch is about to be yielded, with these contents on this worker."""

    def end(self) -> None:
        """All parts are exhausted."""


class StreamLoader:
    """A DataLoader that yields this worker's part of a stream, by the sizes of its plan."""

    def __init__(
        self, loader: DataLoader[Any], pace: Pace, control: Control, slicer: Slicer | None
    ) -> None:
        self.dataset = loader.dataset
        self._users = loader
        self._pace = pace
        self._control = control
        self._slicer = slicer
        self._first = _FirstPass(loader.worker_init_fn)
        self._resumed = False
        self._left = False
        """Whether a pass has begun and not come to its end."""
        self._beginning = deepcopy(_state_of(self.dataset))
        self._start = 0
        self._loader = self._made()
        self.states: dict[int, Any] = {}
        """Where each loader process stands after the last batch handed out, if it can say."""
        self.states_before: dict[int, Any] = {}
        """The same, before that batch."""

    def __len__(self) -> int:
        raise TypeError("a stream has no length: it is over when every worker's part is")

    def __iter__(self) -> Iterator[Any]:
        resumed = self._resumed
        self._resumed = False
        if not resumed:
            self._begin_anew()
        epoch, step, position = self._pace.begin(resumed=resumed)
        self._start = step
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        self._left = True
        fetching = iter(self._loader)
        self._first.states = {}
        form: Any = None
        exhausted = False
        while True:
            # Also when nothing is asked for any more: all workers follow the plans alike.
            self._pace.plan_at(step)
            with self._pace.loading():
                fetched: Fetched | None = None if exhausted else next(fetching, None)
            exhausted = fetched is None
            samples = 0 if fetched is None else fetched.samples
            taken = self._control.table([samples], f"step {step} of the stream")
            split = tuple(int(row[0]) for row in taken)
            if not any(split):
                break
            self._note(fetched)
            if fetched is not None:
                contents = form = fetched.contents
            else:
                form = self._form() if form is None else form
                contents = without_samples(form, self._slicer)
            batch = Batch(step=step, epoch=epoch, start=position, split=split)
            self._pace.hand_out(batch, contents)
            yield contents
            step, position = batch.step + 1, batch.stop
        self.states, self.states_before = {}, {}
        self._left = False
        self._pace.end()

    def resume(self, states: dict[int, Any]) -> None:
        """Let the next pass go on where each loader process stood."""
        if self._users.num_workers == 0 and 0 in states:
            self.dataset.load_state_dict(states[0])  # type: ignore[attr-defined]
        self.states, self.states_before = dict(states), dict(states)
        self._first.states = dict(states)
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
            f"worker {self._control.worker}'s part of the stream has no sample at all, so no "
            "empty batch of its form can be made; give every worker at least one sample"
        )

    def _note(self, fetched: "Fetched | None") -> None:
        self.states_before = dict(self.states)
        if fetched is not None and fetched.state is not None:
            self.states[fetched.process] = fetched.state

    def _made(self) -> DataLoader[Any]:
        loader = DataLoader(
            self._users.dataset,
            batch_size=1,
            drop_last=self._users.drop_last,
            collate_fn=_Collate(self._users.collate_fn, self._users.dataset),
            worker_init_fn=self._first,
            **settings_kept(self._users),
        )
        # DataLoader refuses batches of changing size for streams, though its fetcher takes as
        # many samples as it is asked for.
        object.__setattr__(loader, "batch_sampler", PerPass(self._asked))
        return loader

    def _asked(self) -> Iterator[list[int]]:
        """Ask for each step's samples; runs ahead of the yields by the loader's lead.

        A share of 0 asks for one sample all the same: nobody else can read this worker's part.
        """
        for step in count(self._start):
            share = self._pace.plan_at(step).split[self._control.worker]
            yield [0] * max(1, share)


class Fetched(NamedTuple):
    """What a loader process sends."""

    samples: int
    process: int
    """Number of the loader process; 0 in the worker itself."""
    state: Any
    """Where its copy of the data set stands now; None if it cannot say."""
    contents: Any


class _Collate:
    """The user's collate_fn, and what is known only where it runs."""

    def __init__(self, collate: Any, dataset: Any) -> None:
        self._collate = collate
        self._dataset = dataset

    def __call__(self, samples: list[Any]) -> Fetched:
        process = get_worker_info()
        dataset = self._dataset if process is None else process.dataset
        state = _state_of(dataset)
        if process is None:  # nothing pickles the state here, and the data set may go on using it
            return Fetched(len(samples), 0, deepcopy(state), self._collate(samples))
        return Fetched(len(samples), process.id, state, self._collate(samples))


def _state_of(dataset: Any) -> Any:
    """Return where a data set stands; None if it cannot say."""
    return dataset.state_dict() if hasattr(dataset, "state_dict") else None


class _FirstPass:
    """The user's worker_init_fn; in the first pass after a resume it also sets the place."""

    def __init__(self, init: Any) -> None:
        self._init = init
        self.states: dict[int, Any] = {}

    def __call__(self, process: int) -> None:
        if self._init is not None:
            self._init(process)
        if process in self.states:
            info = get_worker_info()
            assert info is not None
            info.dataset.load_state_dict(self.states[process])  # type: ignore[attr-defined]


class TrainingPace:
    """The steps of a training."""

    def __init__(self, run: Run, exchange: Exchange) -> None:
        self._run = run
        self._exchange = exchange
        self._end = 0

    def begin(self, *, resumed: bool) -> tuple[int, int, int]:
        """Start where training stands, or with the next epoch if this one was left early."""
        if self._run.progress.position and not resumed:
            self._run.progress = self._run.progress.next_epoch()
        place = self._run.begin_pass()
        self._exchange.begin_pass()
        self._end = place.position
        return place.epoch, place.step, place.position

    def plan_at(self, step: int) -> Plan:
        """Return the plan of a step."""
        return self._exchange.plan_at(step)

    def loading(self) -> AbstractContextManager[None]:
        """Measure how long it takes."""
        return self._run.loading()

    def hand_out(self, batch: Batch, contents: Any) -> None:
        """Note the batch, and tell the other workers where that is needed."""
        self._end = batch.stop
        self._run.hand_out(batch, contents)
        self._exchange.post(batch)

    def end(self) -> None:
        """The epoch is over if all its samples are consumed."""
        self._run.progress = self._run.progress.end_pass(self._end)


class EvaluationPace:
    """The steps of an evaluation, by the shares of the plan in effect."""

    def __init__(self, run: Run, global_batch: int) -> None:
        self._run = run
        self._global_batch = global_batch

    def begin(self, *, resumed: bool) -> tuple[int, int, int]:
        """Start at the beginning."""
        self._run.disturb()
        return 0, 0, 0

    def plan_at(self, step: int) -> Plan:
        """Return the plan in effect, for the evaluation's own batch size."""
        return self._run.plan.scaled(self._global_batch)

    def loading(self) -> AbstractContextManager[None]:
        """Nothing is measured."""
        return nullcontext()

    def hand_out(self, batch: Batch, contents: Any) -> None:
        """Nothing to note."""

    def end(self) -> None:
        """Nothing to note."""
