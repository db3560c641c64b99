"""Gradients that are not finite: whose they are, and who says so.

The sum over the workers spreads one worker's NaN to all of them, and with the update it reaches
the weights: one step later every worker's own part is not finite. So the step in which a worker's
part was not finite for the first time tells the culprit from the others. Each worker that finds
its own part not finite leaves a `Claim` where all can read it, and the claims name the culprits.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from json import dumps, loads

from poise.errors import StateMismatch

UNUSED_IN_A_ROW = 20
"""Steps in a row that no optimizer used until it is said all the same. A GradScaler halves a scale
of 65,536 down to 1 in 16 steps: what is still not finite then is so without its scale."""


@dataclass(frozen=True)
class Claim:
    """What a worker says of its own part of the gradient, which is not finite."""

    since: int
    """The first step in a row in which it was not,"""
    last: int
    """and the last."""
    weights: bool = True
    """Whether the weights were still finite in the first of them."""
    used: bool = False
    """Whether an optimizer used it, so that the weights are not finite from then on."""

    @property
    def in_a_row(self) -> int:
        """How many steps that are."""
        return self.last - self.since + 1

    def at(self, step: int, *, weights: bool) -> "Claim":
        """Return the claim after another step; one that was finite in between starts it anew.

        >>> Claim(7, 7).at(8, weights=True).since, Claim(7, 7).at(9, weights=True).since
        (7, 9)
        """
        if self.used or step <= self.last + 1:
            return replace(self, last=max(step, self.last))
        return Claim(step, step, weights)

    def to_json(self) -> str:
        """Return it as text."""
        return dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Claim | None":
        """Return what a worker left; None: nothing yet."""
        try:
            return Claim(**loads(text)) if text else None
        except (TypeError, ValueError):
            raise StateMismatch(
                f"a worker says {text!r} of its gradients, which is no claim; use one version of "
                "Poise on all workers"
            ) from None


def culprits(own: Claim, claims: Mapping[int, Claim]) -> list[int]:
    """Return the workers whose part was the first that was not finite.

    A claim of a step long ago has nothing to do with this one, unless an optimizer used it.

    >>> culprits(Claim(8, 8), {0: Claim(8, 8), 1: Claim(7, 8, used=True), 2: Claim(2, 2)})
    [1]
    """
    related = {
        worker: claim
        for worker, claim in claims.items()
        if claim.used or claim.last >= own.since - 1
    }
    first = min((claim.since for claim in related.values()), default=own.since)
    return [worker for worker, claim in sorted(related.items()) if claim.since == first]


def speaks(worker: int, blamed: list[int]) -> bool:
    """Whether a worker is one that says it: the first of the culprits, and worker 0.

    >>> [worker for worker in range(4) if speaks(worker, [1, 2])]
    [0, 1]
    """
    return worker in (0, blamed[0])


def message(blamed: list[int], claim: Claim, workers: int) -> str:
    """Say what was found, and what to do.

    Args:
        blamed: the culprits.
        claim: what the first of them says.
        workers: how many there are.
    """
    step = claim.since
    if not claim.weights:
        return (
            f"the weights were not finite when step {step} began, so no gradient is since then, "
            "and no worker found its own part of an earlier gradient at fault. Look at the "
            "learning rate, at what your loop does to the weights, and at a comm_hook that rounds; "
            "go on from a save of finite weights"
        )
    if len(blamed) == 1:
        whose = f"worker {blamed[0]}'s own part"
    elif len(blamed) == workers:
        whose = "every worker's own part"
    else:
        whose = f"the own part of workers {', '.join(map(str, blamed))}"
    what = f"{whose} of the gradient of step {step} is not finite (NaN or infinite)"
    if claim.used:
        return (
            f"{what}, and an optimizer used the sum, so the weights of all workers are not finite "
            "from then on. Look at the samples and the loss of that step, clip gradients or lower "
            f"the learning rate; go on from a save made before step {step}"
        )
    return (
        f"{what}, and it was not in {claim.in_a_row} steps in a row, which no optimizer used: "
        "the training learns nothing. The scale of a GradScaler does not explain so many; look at "
        "the samples and the loss"
    )
