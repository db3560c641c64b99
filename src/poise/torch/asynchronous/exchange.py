"""A worker's side of the exchange with its server: gradients out, weights and samples in."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from poise.errors import OutOfOrder
from poise.runtime.events import Events
from poise.torch.asynchronous.courier import Courier
from poise.torch.asynchronous.facts import Given
from poise.torch.asynchronous.joining import Joining
from poise.torch.asynchronous.measuring import Measuring
from poise.torch.asynchronous.messages import Begin, Handed, NoMore, Push, Weights
from poise.torch.asynchronous.replica import Notices, Replica
from poise.torch.backwards import Tally, count_backwards, is_usable
from poise.torch.loader import lead


class ServerExchange:
    """What a worker does with its server, in the order in which its loop does it."""

    def __init__(self, joining: Joining, given: Given, epoch: int, events: Events) -> None:
        loads_itself = given.loader.num_workers == 0
        self._replica = Replica(given.models, given.optimizer)
        self._notices = Notices(given.models)
        self._under_way = _UnderWay(self._replica.trained)
        self.measuring = Measuring(given.device, events, loads_itself=loads_itself)
        self.courier = Courier(joining, self._replica, self.measuring.waited)
        self._shares_at_once = lead(given.loader) + 1 + joining.ahead
        self.epoch = epoch
        self.done = False
        self.news: Weights | None = None
        """What the server said last."""
        self._hooks = [
            self._under_way.counting,
            given.optimizer.register_step_pre_hook(self._push),
            given.optimizer.register_step_post_hook(self._restore),
        ]

    def begin(self, *, new_pass: bool) -> bool:
        """Ask for local batches; False: the epoch, or the training, is over.

        A batch that the loop did nothing with comes again if it begins a new pass, and is skipped
        if it went on to the next one.
        """
        under_way = self._under_way
        under_way.settle(leaving=new_pass)
        self.courier.wait()
        self.measuring.disturb()
        skipped, kept = under_way.take_skipped(), tuple(under_way.numbers)
        answer = self.courier.ask(Begin(self.epoch, self._shares_at_once, skipped, kept))
        if isinstance(answer, NoMore):
            self._take(self.courier.arrived())
            self.epoch, self.done = answer.epoch, answer.done
            under_way.numbers.clear()
            return False
        self._take(answer)
        if answer.counted:
            under_way.numbers.clear()  # what is added up is pushed with the next one
        return True

    def hand_out(self, handed: Handed, contents: Any, count: float) -> None:
        """The loader yields a local batch, whose loss is divided by this count."""
        under_way = self._under_way
        under_way.settle(leaving=False)
        self._notices.of_rates(self._replica.stated_rates, self._replica.rates)
        self.measuring.begin(under_way.steps, handed, contents, fresh=not under_way.numbers)
        under_way.add(handed.number, count)

    def close(self) -> None:
        """Let go of the loop, once the connection is closed."""
        for hook in self._hooks:
            hook.remove()
        self.courier.close()

    def _push(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Send the gradient; the optimizer then steps without one, which changes nothing."""
        under_way, replica = self._under_way, self._replica
        _check_step(optimizer, args, kwargs)
        if not under_way.numbers:
            raise OutOfOrder(
                "optimizer.step() ran without a batch from the prepared loader; take batches "
                "from the loader that prepare returned"
            )
        replica.check(optimizer)
        self._notices.of_buffers()
        self.courier.wait()
        push = Push(
            present=replica.read_gradient(),
            numbers=tuple(under_way.numbers),
            skipped=under_way.take_skipped(),
            versions=replica.versions,
            count=under_way.count,
            report=self.measuring.report(),
        )
        under_way.numbers.clear()
        self._take(self.courier.arrived())
        self._take(self.courier.carry(push, f"the push of step {under_way.steps - 1}"))
        self.measuring.pushed()
        replica.put_gradients_aside()

    def _restore(self, optimizer: Optimizer, *_: Any) -> None:
        """Give the gradients back; runs after the step."""
        self._replica.put_gradients_back()
        self.measuring.updated(optimizer)

    def _take(self, said: Weights | None) -> None:
        if said is not None:
            self._replica.take(said)
            self.news = said


class _UnderWay:
    """What was handed to the loop since the last push, and what became of it."""

    def __init__(self, trained: Sequence[nn.Parameter]) -> None:
        self.steps = 0
        """Local batches so far."""
        self.numbers: list[int] = []
        """Of those whose gradients are added up; what is pushed is the server's to account for."""
        self.count = 0.0
        """What the loss of the last one is divided by."""
        self._skipped: list[int] = []
        """The numbers of those whose gradients were thrown away, or never computed."""
        self._trained = trained
        self._backwards = Tally()
        self.counting = count_backwards(trained, self._backwards)

    def add(self, number: int, count: float) -> None:
        """The loop gets a local batch."""
        self.numbers.append(number)
        self.count = count
        self.steps += 1
        self._backwards.clear()

    def settle(self, *, leaving: bool) -> None:
        """Find out what became of batches that no optimizer step followed.

        Gradients that are still there are pushed with the next one; others were thrown away. A
        batch without a backward has none: the loop skipped it, or it left the pass.
        """
        if self.numbers and not self._backwards.backwards:
            last = self.numbers.pop()
            self._skipped += [] if leaving else [last]
        if self.numbers and not is_usable([p.grad for p in self._trained]):
            self._skipped += self.numbers
            self.numbers.clear()

    def take_skipped(self) -> tuple[int, ...]:
        """Return the numbers of those that were skipped, once."""
        skipped, self._skipped = tuple(self._skipped), []
        return skipped


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
