"""Staleness: how old the weights are that an asynchronous gradient was computed with.

Notation: n workers, worker k takes t_k seconds for an iteration, without queueing at the server.

    share of updates     (1/t_k) / sum(1/t)
    staleness            t_k sum_{j != k} 1/t_j          updates missed since it read the weights

Weighted by the shares, the mean staleness is n - 1 whatever the times: equal times remove the
tail, not the mean.
"""

import math


def usual_staleness(workers: int, *, ahead: bool = False) -> int:
    """Return the mean staleness of workers: n - 1.

    Where they compute ahead, with weights that are one exchange older, each of them makes one more
    update in between, itself included.

    >>> usual_staleness(4), usual_staleness(4, ahead=True), usual_staleness(1, ahead=True)
    (3, 7, 1)
    """
    return 2 * workers - 1 if ahead else workers - 1


def rate_factor(share: float, staleness: float, usual: float, *, damped: bool = True) -> float:
    """Return what the learning rate of one push is multiplied by.

    The rate is stated for the global batch, so a push counts by its worker's share of it; if
    damped, less the more its staleness exceeds the usual one. It is the rate that is multiplied
    and not the gradient, whose scale optimizers of Adam's kind ignore.

    >>> rate_factor(0.25, staleness=3, usual=3), rate_factor(0.25, staleness=5, usual=3)
    (0.25, 0.08333333333333333)
    """
    excess = max(0.0, staleness - usual) if damped else 0.0
    return share / (1 + excess)


def stable_part(staleness: float) -> float:
    """Return the largest stable step with gradients that are late, relative to that without.

    Gradient descent on a quadratic of curvature c, with gradients t steps late, is stable up to a
    step of 2 sin(pi / (4 t + 2)) / c.

    >>> stable_part(0), round(stable_part(1), 3), round(stable_part(4), 3)
    (1.0, 0.5, 0.174)
    """
    return math.sin(math.pi / (4 * staleness + 2))


def lowered_momentum(momentum: float, staleness: float) -> float:
    """Return the explicit momentum that goes with the implicit one of stale gradients.

    Momentum m makes a gradient act m / (1 - m) updates late on average, and so does a staleness
    of as many updates (Mitliagkas et al., "Asynchrony begets momentum", 2016: n workers, whose
    mean staleness is n - 1, act like a momentum of 1 - 1/n). Both together are to be as late as
    the user chose.

    >>> lowered_momentum(0.9, staleness=0), round(lowered_momentum(0.9, staleness=3), 3)
    (0.9, 0.857)
    >>> lowered_momentum(0.9, staleness=15)
    0.0
    """
    if not staleness or not 0 < momentum < 1:
        return momentum
    late = max(0.0, momentum / (1 - momentum) - staleness)
    return late / (1 + late)
