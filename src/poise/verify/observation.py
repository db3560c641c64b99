"""What `poise verify` sees of a training: values that travel through files."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

Arrangement = Literal["alone", "reordered", "shared"]
"""One process; one process with the samples of each batch in reversed order and weights changed
in their last bit, which shows what rounding does; several workers with unequal shares."""

Values = dict[str, Tensor]
"""Numbers by the name of the parameter they belong to."""

Leaf = tuple[tuple[int, ...], str, str, str]
"""One tensor of one sample: its shape, and fingerprints of all of it, of it without the run of
equal values at its end, and of it without the run at its start. Padding is such a run."""

_MOST_ELEMENTS = 2**16


class Variant(NamedTuple):
    """One way to run the script."""

    arrangement: Arrangement
    stilled: bool = False
    """Whether dropout is left out and BatchNorm normalizes by its running statistics."""

    def __str__(self) -> str:
        return f"{self.arrangement}-stilled" if self.stilled else self.arrangement

    @staticmethod
    def named(text: str) -> "Variant":
        """Read what str() gave.

        >>> Variant.named(str(Variant("shared", stilled=True)))
        Variant(arrangement='shared', stilled=True)
        """
        arrangement, _, rest = text.partition("-")
        return Variant(cast(Arrangement, arrangement), stilled=bool(rest))


@dataclass
class StepSeen:
    """One step on one worker: a batch, and the gradient that came of it."""

    samples: list[list[Leaf]] | None
    """The contents of each sample; None if the batch has a form that cannot be taken apart."""
    before: Values = field(default_factory=dict)
    """Weights at its start."""
    weight: float = 1.0
    """This worker's factor in the gradient."""
    local: Values = field(default_factory=dict)
    """Its own gradient, before weighting."""
    used: Values = field(default_factory=dict)
    """The gradient that the optimizers used; nothing if they left the step out."""
    settings: dict[str, float] = field(default_factory=dict)
    """Learning rates and other numbers that the optimizers used it with."""
    after: Values = field(default_factory=dict)
    """Weights after the update."""
    digests: dict[str, str] = field(default_factory=dict)
    """Fingerprints of the same, to compare workers with each other."""


@dataclass
class Observation:
    """A run of the script as one worker saw it."""

    worker: int
    split: tuple[int, ...]
    steps: list[StepSeen] = field(default_factory=list)
    batch_norms: list[str] = field(default_factory=list)
    """Layers that normalize by the batch."""
    dropouts: list[str] = field(default_factory=list)
    """Layers that drop values at random."""
    draws_in_model: bool = False
    """Whether the global random generators moved while the model ran."""
    draws_in_loop: bool = False
    """Whether they moved elsewhere between a batch and the optimizer."""
    autocast: bool = False
    """Whether something ran in 16-bit precision."""
    counted: bool = False
    """Whether the script gives a count function."""
    compressed: bool = False
    """Whether the script gives a comm_hook, which is left out here."""

    @property
    def global_batch(self) -> int:
        """Samples of a step."""
        return sum(self.split)


@dataclass(frozen=True)
class Runs:
    """The runs that are compared."""

    alone: Observation
    reordered: Observation
    shared: tuple[Observation, ...]
    """One for each worker."""


def kept(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor's elements, of a large one every n-th, so that files stay small.

    >>> len(kept(torch.zeros(300, 1000)))
    60000
    """
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    every = -(-dense.numel() // _MOST_ELEMENTS) or 1
    return dense.flatten()[::every].cpu().clone()


def write(directory: Path, variant: Variant, observation: Observation) -> None:
    """Save what one worker saw."""
    fields = {**vars(observation), "steps": [vars(step) for step in observation.steps]}
    torch.save(fields, _file(directory, variant, observation.worker))


def read(directory: Path, variant: Variant, worker: int) -> Observation:
    """Load what one worker saw; values only, no objects."""
    fields = torch.load(_file(directory, variant, worker), weights_only=True)
    return Observation(**{**fields, "steps": [StepSeen(**step) for step in fields["steps"]]})


def _file(directory: Path, variant: Variant, worker: int) -> Path:
    return directory / f"{variant}-{worker}.pt"
