"""A worker's side of the exchange with its server: gradients out, weights and samples in."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from torch import nn
from torch.optim import Optimizer

from poise.errors import Disagreement, OutOfOrder
from poise.runtime.channel import GONE
from poise.runtime.clocks import Waits
from poise.runtime.events import Events
from poise.torch.asynchronous.facts import Given
from poise.torch.asynchronous.joining import Joining
from poise.torch.asynchronous.link import server_needed
from poise.torch.asynchronous.measuring import Measuring
from poise.torch.asynchronous.messages import Begin, Handed, Leave, Message, NoMore, Push, Weights
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
        self.courier = Courier(joining, self._replica, self.measuring.waits)
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
        self._take_over()
        if isinstance(answer, NoMore):
            self.epoch, self.done = answer.epoch, answer.done
            under_way.numbers.clear()
            return False
        if answer.counted:
            under_way.numbers.clear()  # what is added up is pushed with the next one
        return True

    def hand_out(self, handed: Handed, contents: Any, count: float) -> None:
        """The loader yields a local batch, whose loss is divided by this count."""
        under_way = self._under_way
        under_way.settle(leaving=False)
        self._notices.of_rates(self._replica.stated_rates, self._replica.rates)
        self.measuring.begin(under_way.steps, handed, contents, fresh=not under_way.numbers)
        under_way.add(handed.share.number, count)

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
        self._take_over()
        self.courier.carry(push, f"the push of step {under_way.steps - 1}")
        self._take_over()
        self.measuring.pushed()
        replica.put_gradients_aside()

    def _restore(self, optimizer: Optimizer, *_: Any) -> None:
        """Give the gradients back; runs after the step."""
        self._replica.put_gradients_back()
        self.measuring.updated(optimizer)

    def _take_over(self) -> None:
        """Compute with the weights that have arrived from now on, if there are some."""
        said = self.courier.arrived()
        if said is not None:
            self._replica.take(said)
            self.news = said


class Courier:
    """Carries pushes to the server, one at a time; with `ahead`, while the worker computes."""

    def __init__(self, joining: Joining, replica: Replica, waits: Waits) -> None:
        self._joining = joining
        self._replica = replica
        self._waits = waits
        self._thread = ThreadPoolExecutor(1, "poise-exchange") if joining.ahead else None
        self._traveling: Future[Weights] | None = None
        self._arrived: Weights | None = None
        """Weights that are here and not yet taken over."""
        self._shares: deque[Handed] = deque()
        """Handed to this worker, and not yet fetched."""

    def ask(self, asked: Begin) -> Weights | NoMore:
        """Ask for local batches; those that were handed before are forgotten."""
        self._shares.clear()
        answer = self._answer(asked, "asking for samples")
        if isinstance(answer, Weights):
            self._arrive(answer, 0.0)
        elif not isinstance(answer, NoMore):
            raise Disagreement(f"the server answered with {type(answer).__name__}")
        return answer

    def next_share(self) -> Handed | None:
        """Return the next local batch to fetch; None: there is no more for now."""
        if not self._shares:
            self.wait()
        return self._shares.popleft() if self._shares else None

    def carry(self, push: Push, doing: str) -> None:
        """Carry a push; new weights are here then, or arrive while the worker computes."""
        if self._thread is not None:
            self._traveling = self._thread.submit(self._exchange, push, doing)
        else:
            answer = self._exchange(push, doing)
            self._arrive(answer, answer.queued_s)

    def wait(self) -> None:
        """Wait for what travels while the worker computes, if there is something."""
        if self._traveling is None:
            return
        start_s = time.perf_counter()
        traveling, self._traveling = self._traveling, None
        answer = traveling.result()
        self._arrive(answer, min(time.perf_counter() - start_s, answer.queued_s))

    def arrived(self) -> Weights | None:
        """Return weights that are here and not yet taken over, once."""
        arrived, self._arrived = self._arrived, None
        return arrived

    def leave(self) -> None:
        """Tell the server that this worker leaves."""
        with suppress(*GONE, Disagreement):  # it may have left before
            self.wait()
            self._joining.link.say(Leave())

    def close(self) -> None:
        """End the thread, whose connection is closed."""
        if self._thread is not None:
            self._thread.shutdown()

    def _arrive(self, answer: Weights, waited_s: float) -> None:
        self._arrived = answer
        self._shares.extend(answer.handed)
        self._waits.seconds += waited_s

    def _exchange(self, push: Push, doing: str) -> Weights:
        answer = self._answer(push, doing)
        if not isinstance(answer, Weights):
            raise Disagreement(f"the server answered a push with {type(answer).__name__}")
        return answer

    def _answer(self, said: Begin | Push, doing: str) -> Message:
        """Return what the server answers, with the weights, if they follow, in the replica."""
        link = self._joining.link
        with server_needed(self._joining.address, doing):
            link.say(said)
            if isinstance(said, Push):
                link.send(self._replica.gradient.bytes)
            answer = link.answer()
            if isinstance(answer, Weights):
                link.receive(self._replica.weights.bytes)
        return answer


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
