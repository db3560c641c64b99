"""The causes that `poise verify` knows, in words: what was found, and what to do."""

from collections.abc import Sequence
from dataclasses import dataclass

_MOST_LAYERS = 3
_HARD_TO_READ = 1e-5
"""Smaller parts are written with an exponent, not as a percentage."""


@dataclass(frozen=True)
class Cause:
    """Why a training is not the same."""

    name: str
    evidence: str
    """What was found."""
    advice: str
    """What to do."""
    stillable: bool = False
    """Whether a run without dropout and batch statistics shows if it is the only cause."""


SUM = Cause(
    "loss denominator",
    "the gradient of one process is the plain sum of the workers', so the loss is a sum over the "
    "samples, or divided by a fixed number",
    'use the mean over the batch at hand (reduction="mean"): Poise weights means',
)
RANDOM_LOOP = Cause(
    "random numbers in the training loop",
    "the script draws them between a batch and its optimizer step (noise, mixup, masks), and they "
    "fall on other samples when the global batch is split",
    "draw them in the data set's __getitem__, where Poise seeds them for each sample; or accept "
    "that the training is the same in distribution only",
)
ORDER = Cause(
    "order of samples",
    "the gradient changes when the same samples come in another order, so it depends on a "
    "sample's place or neighbors in the batch, or on a random generator of the script's own",
    "make the loss of a sample depend on that sample alone",
)
AFTER_BACKWARD = Cause(
    "gradient changed after backward",
    "the gradients are right when they are summed over the workers, and not when the optimizer "
    "uses them",
    "leave out what changes them differently on several workers, such as an all_reduce or a "
    "division of the script's own: after backward they are those of the global batch",
)
START = Cause(
    "initial weights",
    "the model starts with other weights in each run, though torch, random and numpy.random are "
    "seeded alike",
    "make the weights from these generators, or seed the one they come from, the same on every "
    "worker",
)
UPDATES = Cause(
    "updates",
    "gradients and optimizer settings are the same, the new weights are not",
    "look for what else changes the weights: noise, averaging or loading that depends on the "
    "worker",
)
UNKNOWN = Cause(
    "not found",
    "data, order, weights and layers show none of the known causes",
    "look for what depends on the number of workers, or on this worker's number",
)


def batch_norm(layers: Sequence[str]) -> Cause:
    """Layers that normalize by the batch."""
    return Cause(
        "BatchNorm",
        f"each worker's local batch is normalized by itself in {_listed(layers)}, so the result "
        "depends on how the global batch is split",
        "use GroupNorm or LayerNorm, or keep BatchNorm in eval mode; or accept it (docs/limits.md)",
        stillable=True,
    )


def dropout(layers: Sequence[str]) -> Cause:
    """Random numbers in the forward pass, of layers or of none."""
    where = _listed(layers) if layers else "the model's own code"
    return Cause(
        "dropout",
        f"random numbers are drawn in the forward pass, in {where}, and fall on other samples "
        "when the global batch is split, so the training is the same in distribution only",
        "nothing, if that is enough; train without dropout to get the same numbers",
        stillable=True,
    )


def scaled(factor: float, workers: int) -> Cause:
    """A gradient that is a multiple of the right one."""
    return Cause(
        "loss denominator",
        f"the gradient of {workers} workers is {factor:.4g} times that of one process, so the "
        "loss is scaled by something that depends on the number of workers or their shares",
        "leave that factor out: Poise weights the ordinary mean loss of each worker",
    )


def mean(right: Sequence[float], used: Sequence[float], *, counted: bool) -> Cause:
    """A loss that is a mean over something else than Poise was told."""
    what = "what count returns" if counted else "samples"
    advice = (
        "let count(batch) return exactly what the loss of that batch is divided by"
        if counted
        else "pass Balancer(..., count=function), where function(batch) returns what the loss is "
        "divided by"
    )
    return Cause(
        "loss denominator",
        f"the weights should be {_numbers(right)}, but were {_numbers(used)}: the loss is a mean "
        f"over something else than {what}, such as tokens",
        advice,
    )


def in_batch_negatives(left: float) -> Cause:
    """Samples that are compared with each other; no weights explain so much of the gradient."""
    return Cause(
        "in-batch negatives",
        f"{_no_weights(left)}, so the samples of a batch influence each other: in-batch "
        "negatives, a contrastive loss, or attention or statistics across the batch",
        "use a loss that is a mean over samples, each by itself; or accept that it compares the "
        "samples of a local batch only",
    )


def padding(left: float) -> Cause:
    """Padding that is seen; no weights explain so much of the gradient."""
    return Cause(
        "padding",
        f"{_no_weights(left)}, and samples are padded to the longest of their local batch, which "
        "changes the result if padding is not masked",
        "mask the padding in model and loss, or pad to a fixed length",
    )


def augmentation(step: int, sample: int) -> Cause:
    """A sample whose contents depend on when it is fetched."""
    return Cause(
        "unseeded augmentation",
        f"sample {sample} of step {step} has other contents when the samples of its batch come "
        "in another order, so it depends on more than (seed, epoch, sample)",
        "draw random numbers in the data set's __getitem__ from torch, random or numpy.random, "
        "which Poise seeds for each sample; not from a generator of its own, nor in collate_fn",
    )


def other_data(step: int, sample: int, worker: int) -> Cause:
    """A sample that is not the same on a worker."""
    return Cause(
        "data that differs between workers",
        f"sample {sample} of worker {worker} in step {step} is not the one that one process has "
        "in its place",
        "build the same data set on every worker, from the same files and the same seed, without "
        "a part or a seed of each worker's own: Poise gives each its share",
    )


def other_setting(name: str, ours: float, theirs: float, worker: int) -> Cause:
    """An optimizer that is set in another way on a worker."""
    return Cause(
        "optimizer settings",
        f"the optimizer's {name} is {theirs:g} on worker {worker}, and {ours:g} in one process",
        "set the optimizer for the global batch, which is the same on any number of workers",
    )


def other_steps(ours: int, theirs: int, worker: int) -> Cause:
    """A worker that takes more or fewer steps."""
    return Cause(
        "number of steps",
        f"the optimizer takes {theirs} steps on worker {worker}, and {ours} in one process",
        "let every worker take the steps that one process takes: a step is one global batch",
    )


def percent(part: float) -> str:
    """Return a part of a whole as people read it.

    >>> percent(0.1234), percent(0.00021), percent(3e-8)
    ('12 %', '0.021 %', '3e-08')
    """
    if part < _HARD_TO_READ:
        return f"{part:.0e}"
    return f"{100 * part:.2g} %" if part < 1 else f"{100 * part:.0f} %"


def _no_weights(left: float) -> str:
    return (
        "no weights add the workers' gradients up to that of one process (the best leave "
        f"{percent(left)} of it)"
    )


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values)


def _listed(layers: Sequence[str]) -> str:
    """Name the first few layers."""
    names = ", ".join(f"`{name}`" if name else "the model itself" for name in layers[:_MOST_LAYERS])
    more = len(layers) - _MOST_LAYERS
    return f"{names} and {more} more" if more > 0 else names
