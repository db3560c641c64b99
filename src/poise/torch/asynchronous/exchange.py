"""A worker's side of the exchange with its server: gradients out, weights and samples in."""

import math
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from poise.core.batch import Batch
from poise.core.timing import Floats
from poise.engine.report import Report
from poise.errors import Disagreement, OutOfOrder, PoiseWarning, ServerLost
from poise.torch.asynchronous.buffers import OtherBuffers
from poise.torch.asynchronous.flat import Flat
from poise.torch.asynchronous.link import Link
from poise.torch.asynchronous.messages import Begin, Handed, Leave, NoMore, Push, Weights
from poise.torch.asynchronous.parameters import statistics, trained_parameters
from poise.torch.compiling import graphs_compiled
from poise.torch.meter import Meter, observation_of
from poise.torch.module import count_backwards
from poise.torch.run import Tally, is_usable

_GONE = (OSError, EOFError)
_LOOKS = 3
"""Pushes after which it is clear which buffers training changes."""


class Waits:
    """How long this worker has waited for the server or for others, the running total."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        """Return the seconds."""
        return self.seconds


class ServerExchange:
    """What a worker does with its server, in the order in which its loop does it."""

    def __init__(
        self,
        link: Link,
        address: str,
        optimizer: Optimizer,
        models: Sequence[nn.Module],
        *,
        meter: Meter,
        waits: Waits,
        ahead: bool,
        shares_at_once: int,
        epoch: int,
    ) -> None:
        self._link = link
        self._address = address
        self._optimizer = optimizer
        self._trained: list[nn.Parameter] = trained_parameters(optimizer)
        self._statistics = statistics(models)
        self._others = OtherBuffers(models)
        self._gradient = Flat([*self._trained, *self._statistics])
        self._weights = Flat([*self._trained, *self._statistics])
        self._meter = meter
        self._waits = waits
        self._thread = ThreadPoolExecutor(1, "poise-exchange") if ahead else None
        self._traveling: Future[Weights] | None = None
        self._arrived: Weights | None = None
        """Weights that are here and not yet taken over."""
        self._shares_at_once = shares_at_once + ahead
        self._shares: deque[Handed] = deque()
        """Handed to this worker, and not yet fetched."""
        self._under_way: list[Handed] = []
        """Handed out by the loader since the last push."""
        self._skipped: list[int] = []
        self._kept: list[Tensor | None] = []
        """The gradients, while the optimizer steps without them."""
        self._count = 0.0
        self._step = 0
        """Local batches that the loader has handed out."""
        self._batches: deque[Batch] = deque(maxlen=2)
        """The last of them, for the meter."""
        self._backwards = Tally()
        self._counting = count_backwards(self._trained, self._backwards)
        self._graphs = 0
        self._rates: list[float] = []
        """As the server said them."""
        self._warned = False
        self._looks = _LOOKS
        self._versions: tuple[int, ...] = ()
        self.epoch = epoch
        self.done = False
        self.news: Weights | None = None
        """What the server said last."""

    def begin(self, *, new_pass: bool) -> bool:
        """Ask for local batches; False: the epoch, or the training, is over.

        A batch that the loop did nothing with comes again if it begins a new pass, and is skipped
        if it went on to the next one.
        """
        self._settle(leaving=new_pass)
        self._await_traveling()
        self._meter.disturb()
        self._shares.clear()
        kept = tuple(handed.number for handed in self._under_way)
        asked = Begin(self.epoch, self._shares_at_once, tuple(self._skipped), kept)
        self._skipped = []
        with self._watch("asking for samples"):
            self._link.say(asked)
            answer = self._link.answer()
            if isinstance(answer, Weights):
                self._receive(answer)
        match answer:
            case Weights():
                self._take(answer)
                if answer.counted:
                    self._under_way = []  # what is added up is pushed with the next one
                return True
            case NoMore():
                if self._arrived is not None:
                    self._take(self._arrived)
                self.epoch, self.done = answer.epoch, answer.done
                self._under_way = []
                return False
        raise Disagreement(f"the server answered with {type(answer).__name__}")

    def next_share(self) -> Handed | None:
        """Return the next local batch to fetch; None: this pass has no more."""
        if not self._shares:
            self._await_traveling()
        return self._shares.popleft() if self._shares else None

    def loading(self) -> AbstractContextManager[None]:
        """The loader is asked for a batch."""
        return self._meter.loading()

    def hand_out(self, handed: Handed, count: float) -> None:
        """The loader yields a local batch."""
        self._settle(leaving=False)
        self._warn_of_scheduler()
        self._under_way.append(handed)
        self._backwards.backwards = 0
        self._count = count
        samples, graphs = handed.count, graphs_compiled()
        batch = Batch(self._step, handed.epoch, 0, (samples,))
        whole, compiled = samples == handed.planned, graphs != self._graphs
        self._meter.begin(batch, samples, whole=whole, compiled=compiled)
        self._batches.append(batch)
        self._graphs = graphs
        self._step += 1

    def push(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Send the gradient; the optimizer then steps without one, which changes nothing."""
        if any(callable(each) for each in (*args, *kwargs.values())):
            raise OutOfOrder(
                "optimizer.step(closure) computes gradients inside the step, and those of this "
                "worker must leave it before; call backward first, and step without a closure"
            )
        if getattr(optimizer, "grad_scale", None) is not None:
            raise OutOfOrder(
                "the GradScaler leaves the unscaling to this optimizer, which steps on the "
                "server; call scaler.unscale_(optimizer) before scaler.step(optimizer)"
            )
        if not self._under_way:
            raise OutOfOrder(
                "optimizer.step() ran without a batch from the prepared loader; take batches "
                "from the loader that prepare returned"
            )
        self._check_trained(optimizer)
        self._warn_of_buffers()
        self._await_traveling()
        push = self._read_gradient()
        self._under_way, self._skipped = [], []
        if self._thread is None:
            answer = self._exchange(push)
            self._waits.seconds += answer.queued_s
            self._take(answer)
        else:
            if self._arrived is not None:
                self._take(self._arrived)
            self._traveling = self._thread.submit(self._exchange, push)
        bucket = self._meter.ready(first=True)
        if bucket is not None:
            self._meter.done(bucket)
        self._kept = [parameter.grad for parameter in self._trained]
        for parameter in self._trained:
            parameter.grad = None

    def restore(self, *_: Any) -> None:
        """Give the gradients back, which the loop may look at; runs after the step."""
        for parameter, gradient in zip(self._trained, self._kept, strict=True):
            parameter.grad = gradient
        self._kept = []
        self._meter.updated()

    def leave(self) -> None:
        """Tell the server that this worker leaves."""
        with suppress(*_GONE, Disagreement):  # it may have left before
            self._await_traveling()
            self._link.say(Leave())

    def close(self) -> None:
        """Let go of the connection."""
        self._counting.remove()
        self._link.close()
        if self._thread is not None:
            self._thread.shutdown()

    def _exchange(self, push: Push) -> Weights:
        with self._watch(f"the push of step {self._step - 1}"):
            self._link.say(push)
            self._link.send(self._gradient.bytes)
            answer = self._link.answer()
            if not isinstance(answer, Weights):
                raise Disagreement(f"the server answered a push with {type(answer).__name__}")
            self._receive(answer)
        return answer

    def _receive(self, answer: Weights) -> None:
        self._link.receive(self._weights.bytes)
        self._shares.extend(answer.handed)

    def _take(self, answer: Weights) -> None:
        """Take new weights over, and the rates that go with them."""
        self._weights.write([*self._trained, *self._statistics])
        self._versions, self.news = answer.versions, answer
        for group, rate in zip(self._optimizer.param_groups, answer.rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        self._arrived = None

    def _await_traveling(self) -> None:
        """Wait for an exchange that overlaps with computing, if there is one."""
        if self._traveling is None:
            return
        start_s = time.perf_counter()
        traveling, self._traveling = self._traveling, None
        self._arrived = traveling.result()
        waited_s = time.perf_counter() - start_s
        self._waits.seconds += min(waited_s, self._arrived.queued_s)

    @torch.no_grad()
    def _read_gradient(self) -> Push:
        gradients = [parameter.grad for parameter in self._trained]
        if any(gradient is not None and gradient.layout != torch.strided for gradient in gradients):
            raise OutOfOrder(
                "a gradient is sparse, and only dense ones travel to a server; use "
                "sparse=False in the embedding"
            )
        for view, gradient in zip(self._gradient.views, gradients, strict=False):
            if gradient is None:
                view.zero_()
            else:
                view.copy_(gradient)
        self._gradient.read(self._statistics, len(self._trained))
        return Push(
            numbers=tuple(handed.number for handed in self._under_way),
            skipped=tuple(self._skipped),
            versions=self._versions,
            present="".join("0" if gradient is None else "1" for gradient in gradients),
            count=self._count,
            report=self._report(),
        )

    def _report(self) -> Report | None:
        """Return what was measured in the step before this one."""
        if len(self._batches) < 2:  # noqa: PLR2004 (this one, and the one before)
            return None
        before = self._batches[0]
        seen = observation_of(before, self._meter.row(before.step)[None])
        if seen.compiling or seen.ready_s is None:
            return None

        def only(values: Floats | None) -> float:
            return math.nan if values is None else float(values[0])

        return Report(
            before.count,
            float(seen.ready_s[0, -1]),
            only(seen.wait_s),
            only(seen.load_s),
            only(seen.input_s),
            only(seen.memory_bytes),
            only(seen.memory_limit_bytes),
        )

    def _settle(self, *, leaving: bool) -> None:
        """Find out what became of batches that no optimizer step followed.

        Gradients that are still there are pushed with the next one; others were thrown away. A
        batch without a backward has none: the loop skipped it, or it left the pass.
        """
        if self._under_way and not self._backwards.backwards:
            last = self._under_way.pop()
            self._skipped += [] if leaving else [last.number]
        if self._under_way and not is_usable([p.grad for p in self._trained]):
            self._skipped += [handed.number for handed in self._under_way]
            self._under_way = []

    def _check_trained(self, optimizer: Optimizer) -> None:
        known = {id(parameter) for parameter in self._trained}
        if any(id(parameter) not in known for parameter in trained_parameters(optimizer)):
            raise OutOfOrder(
                "the optimizer has parameters to train that it did not have in prepare, and the "
                "server does not know them; unfreeze or add them before prepare"
            )

    def _warn_of_buffers(self) -> None:
        """Say once that the server does not have what a model keeps in buffers of its own."""
        if not self._looks:
            return
        self._looks -= 1
        changed = self._others.changed()
        if changed:
            self._looks = 0
            warnings.warn(
                f"training changes the buffers {', '.join(changed[:3])}, of which only running "
                "statistics of normalization layers travel: the server evaluates and saves them "
                'as they were at the start; use mode="sync" for this model',
                PoiseWarning,
                stacklevel=5,
            )

    def _warn_of_scheduler(self) -> None:
        """Say once that a rate that changes with this process's batches reaches nobody."""
        now = [float(group["lr"]) for group in self._optimizer.param_groups]
        if self._warned or now == self._rates:
            return
        self._warned = True
        warnings.warn(
            f"the learning rate changed from {self._rates} to {now} between two batches of this "
            "worker, and the optimizer steps on the server: step the scheduler once per epoch, "
            "or by samples with BySamples, which the server follows too",
            PoiseWarning,
            stacklevel=5,
        )

    @contextmanager
    def _watch(self, doing: str) -> Iterator[None]:
        try:
            yield
        except (Disagreement, ServerLost, OutOfOrder):
            raise
        except _GONE as error:
            raise ServerLost(
                f"the server at {self._address} is gone ({doing} cannot go on: {error}); start it "
                "again, from its last save, and then this worker"
            ) from error
