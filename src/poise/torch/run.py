"""The state of one run that loader, exchange, reduction and balancer share."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from poise.core.batch import Batch
from poise.core.plan import Plan, Timetable
from poise.engine.progress import Progress
from poise.torch.cluster import Cluster
from poise.torch.compiling import graphs_compiled, let_size_vary
from poise.torch.counts import Counts
from poise.torch.liveness import Liveness
from poise.torch.meter import Meter
from poise.torch.norms import Norms


@dataclass
class Tally:
    """The backwards of one model since the last batch was handed out."""

    backwards: int = 0
    """Those that reached the model's parameters."""
    reduced: int = 0
    """Those whose gradient is summed over the workers."""


@dataclass
class Run:
    """Where this worker is: the place in the training and the plans it knows."""

    cluster: Cluster
    liveness: Liveness
    timetable: Timetable
    plan: Plan
    """The plan of the batch handed out last: what all workers know to be in effect."""
    counts: Counts
    start_batch: int
    """The global batch that the user's learning rate is for."""
    progress: Progress = field(default_factory=Progress)
    tallies: list[Tally] = field(default_factory=list)
    """One for each model."""
    parameters: list[nn.Parameter] = field(default_factory=list)
    """Of all models."""
    compiles: bool = False
    """Whether a model runs through torch.compile."""
    graphs: int = 0
    """Graphs that torch.compile had made in this process when the last batch was handed out."""
    meter: Meter | None = None
    """Measures the steps; None: nobody asks for it."""
    norms: Norms | None = None
    """Looks at the gradients; None: nobody asks for it."""
    compared: bool = False
    """Whether the workers have compared their places since this pass over the loader began."""

    def begin_pass(self) -> Progress:
        """A pass over the training loader begins; return where."""
        self.progress = self.progress.begin_pass()
        self.compared = False
        self.disturb()
        return self.progress

    def hand_out(self, batch: Batch, contents: Any) -> None:
        """The training loader yields a batch, with these contents on this worker."""
        self.settle()
        self.progress = self.progress.hand_out(batch)
        self.plan = self.timetable.at(batch.step)
        self.liveness.step = batch.step
        for tally in self.tallies:
            tally.backwards = tally.reduced = 0
        samples = batch.split[self.cluster.worker]
        if self.norms is not None:
            self.norms.begin(batch.step, samples, fresh=not self.progress.unapplied)
        if self.meter is not None:
            whole = batch.split == self.plan.split
            self.meter.begin(batch, samples, whole=whole, compiled=self.compiled())
        self.let_size_vary(contents)
        self.counts.begin(batch, contents)

    def loading(self) -> AbstractContextManager[None]:
        """The training loader is asked for a batch."""
        return nullcontext() if self.meter is None else self.meter.loading()

    def disturb(self) -> None:
        """Something that is no training step runs between two of them."""
        if self.meter is not None:
            self.meter.disturb()

    def reduced(self) -> None:
        """The gradient of the batch under way is summed over the workers."""
        plan = self.plan
        self.progress = self.progress.reduced(plan.gain * self.start_batch / plan.global_batch)

    def settle(self) -> None:
        """Find out what became of a gradient that no optimizer has used.

        A GradScaler that finds a gradient too large leaves the optimizer out, and its hooks are
        not called. The gradient is not finite then, or cleared already. A finite one waits for
        the next batch to be added.
        """
        if self.progress.unapplied and not is_usable([p.grad for p in self.parameters]):
            self.progress = self.progress.skip()

    def let_size_vary(self, contents: Any) -> None:
        """Prepare a batch or a part of one for a compiled model."""
        if self.compiles:
            let_size_vary(contents)

    def compiled(self) -> bool:
        """Whether torch.compile was at work since this was last asked."""
        before, self.graphs = self.graphs, graphs_compiled()
        return self.graphs != before


def is_usable(gradients: list[Tensor | None]) -> bool:
    """Whether there is a gradient that an optimizer could still use: finite, and not cleared."""
    present = [gradient for gradient in gradients if gradient is not None]
    finite = all(bool(torch.isfinite(gradient).all()) for gradient in present)
    return finite and any(bool(gradient.any()) for gradient in present)
