"""A worker's side of the exchange with its server: gradients out, weights and samples in."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch.optim import Optimizer
from torch.utils.data import DataLoader

from poise.errors import OutOfOrder
from poise.runtime.events import Events
from poise.torch.asynchronous.courier import Courier
from poise.torch.asynchronous.facts import Given
from poise.torch.asynchronous.joining import Joining
from poise.torch.asynchronous.measuring import Measuring
from poise.torch.asynchronous.messages import Begin, Handed, NoMore, Push, Weights
from poise.torch.asynchronous.notices import Notices
from poise.torch.asynchronous.replica import Replica
from poise.torch.asynchronous.under_way import UnderWay
from poise.torch.loader import lead


class ServerExchange:
    """What a worker does with its server, in the order in which its loop does it."""

    def __init__(
        self,
        joining: Joining,
        given: Given,
        loader: DataLoader[Any],
        epoch: int,
        events: Events,
    ) -> None:
        self._replica = Replica(given.models, given.optimizer)
        self._measuring = Measuring(given.device, events, loads_itself=loader.num_workers == 0)
        self._courier = Courier(joining, self._replica, self._measuring.waited)
        self._under_way = UnderWay(self._replica.trained)
        self._notices = Notices(given.models)
        self._shares_at_once = lead(loader) + 1 + joining.ahead
        self.epoch = epoch
        self.done = False
        self.news: Weights | None = None
        """What the server said last."""

    def begin(self, *, new_pass: bool) -> bool:
        """Ask for local batches; False: the epoch, or the training, is over.

        A batch that the loop did nothing with comes again if it begins a new pass, and is skipped
        if it went on to the next one.
        """
        under_way = self._under_way
        under_way.settle(leaving=new_pass)
        self._courier.wait()
        self._measuring.disturb()
        skipped, kept = under_way.take_skipped(), under_way.numbers
        answer = self._courier.ask(Begin(self.epoch, self._shares_at_once, skipped, kept))
        if isinstance(answer, NoMore):
            self._take(self._courier.arrived())
            self.epoch, self.done = answer.epoch, answer.done
            under_way.forget()
            return False
        self._take(answer)
        if answer.counted:
            under_way.forget()  # what is added up is pushed with the next one
        return True

    def next_share(self) -> Handed | None:
        """Return the next local batch to fetch; None: this pass has no more."""
        return self._courier.next_share()

    def loading(self) -> AbstractContextManager[None]:
        """The loader is asked for a batch."""
        return self._measuring.fetching

    def hand_out(self, handed: Handed, contents: Any, count: float) -> None:
        """The loader yields a local batch, whose loss is divided by this count."""
        under_way = self._under_way
        under_way.settle(leaving=False)
        self._notices.of_rates(self._replica.stated_rates, self._replica.rates)
        self._measuring.begin(under_way.steps, handed, contents, fresh=not under_way.handed)
        under_way.add(handed, count)

    def push(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Send the gradient; the optimizer then steps without one, which changes nothing."""
        _check_step(optimizer, args, kwargs)
        if not self._under_way.handed:
            raise OutOfOrder(
                "optimizer.step() ran without a batch from the prepared loader; take batches "
                "from the loader that prepare returned"
            )
        self._replica.check(optimizer)
        self._notices.of_buffers()
        self._courier.wait()
        push = self._read_push()
        self._under_way.forget()
        self._take(self._courier.arrived())
        self._take(self._courier.carry(push, f"the push of step {self._under_way.steps - 1}"))
        self._measuring.pushed()
        self._replica.put_gradients_aside()

    def restore(self, optimizer: Optimizer, *_: Any) -> None:
        """Give the gradients back; runs after the step."""
        self._replica.put_gradients_back()
        self._measuring.updated(optimizer)

    def leave(self) -> None:
        """Tell the server that this worker leaves."""
        self._courier.leave()

    def close(self) -> None:
        """Let go of the connection."""
        self._under_way.close()
        self._courier.close()

    def _read_push(self) -> Push:
        present = self._replica.read_gradient()
        return Push(
            numbers=self._under_way.numbers,
            skipped=self._under_way.take_skipped(),
            versions=self._replica.versions,
            present=present,
            count=self._under_way.count,
            report=self._measuring.report(),
        )

    def _take(self, said: Weights | None) -> None:
        if said is not None:
            self._replica.take(said)
            self.news = said


def _check_step(optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise for an optimizer step whose gradient cannot leave before it."""
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
