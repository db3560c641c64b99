"""What happens to the learning rate when the global batch changes.

Notation: B the global batch, B0 the one that the user's learning rate was chosen for,
kappa = B / B0; S and G2 the averages of `poise.core.noise`.

    rule       learning rate x        also
    adascale   r, the gain            r = (S / B0 + G2) / (S / B + G2); Johnson et al. 2020,
                                      arXiv 2007.05105; for SGD
    sqrt       sqrt(kappa)            1 - beta' = kappa (1 - beta), eps' = eps / sqrt(kappa);
                                      Malladi et al. 2022, arXiv 2205.10287; for the Adam family
    linear     kappa                  Goyal et al. 2017, arXiv 1706.02677
    legw       sqrt(kappa)            You et al. 2019, arXiv 1901.08433; the warm-up, kappa times
                                      as many epochs long there, is the user's schedule
    none       1

With B = B0 no rule changes anything.
"""

import difflib
import math
from dataclasses import dataclass

from poise.errors import InvalidSetting

RULES = ("adascale", "sqrt", "linear", "legw", "none")
"""The names that `adjustment` knows."""
CLIPPED_SHARE = 0.2
"""With more of the steps clipped, norms no longer say how far an update goes."""


@dataclass(frozen=True)
class Adjustment:
    """What a rule does to the optimizer's settings, as factors on the user's own.

    >>> adam = adjustment("sqrt", batch=256, start=64)
    >>> adam.factor, round(adam.beta(0.9), 3), round(adam.beta(0.5), 3), adam.eps(1e-8)
    (2.0, 0.6, 0.0, 5e-09)
    """

    factor: float
    """On the learning rate."""
    forgetting: float = 1.0
    """On 1 - beta, for each of Adam's betas."""
    eps_factor: float = 1.0
    """On Adam's eps."""

    def beta(self, beta: float) -> float:
        """Return the beta to use, 1 - forgetting (1 - beta), at least 0."""
        return max(1 - self.forgetting * (1 - beta), 0.0)

    def eps(self, eps: float) -> float:
        """Return the eps to use."""
        return eps * self.eps_factor


def adjustment(rule: str, *, batch: float, start: float, gain: float | None = None) -> Adjustment:
    """Return what a rule does when the global batch is `batch` instead of `start`.

    Only "adascale" looks at the gain. One that was kept from another global batch may lie outside
    the range from 1 to kappa, in which every gain lies; the nearer end is used then.

    >>> adjustment("linear", batch=256, start=64).factor
    4.0
    >>> adjustment("adascale", batch=256, start=64, gain=2.5).factor
    2.5
    """
    kappa = _kappa(batch, start)
    match rule:
        case "adascale":
            return Adjustment(_known(gain, kappa))
        case "sqrt":
            return Adjustment(math.sqrt(kappa), forgetting=kappa, eps_factor=1 / math.sqrt(kappa))
        case "linear":
            return Adjustment(kappa)
        case "legw":
            return Adjustment(math.sqrt(kappa))
        case "none":
            return Adjustment(1.0)
    raise unknown_rule("rule", rule)


def unknown_rule(setting: str, rule: object) -> InvalidSetting:
    """Return the error for a setting that names no rule."""
    near = difflib.get_close_matches(str(rule), RULES, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "choose one of them"
    return InvalidSetting(f"{setting}={rule!r} is unknown; there are {', '.join(RULES)}; {hint}")


def gain(trace: float, grad_sq: float, batch: float, start: float) -> float | None:
    """Return AdaScale's gain, how many steps of `start` samples one of `batch` is worth.

    r = (S / B0 + G2) / (S / B + G2), between 1 and kappa: kappa where noise rules, 1 where the
    gradient does. None where G2 <= 0: not known yet. A trace below 0 is taken as 0.

    >>> gain(trace=300.0, grad_sq=1.0, batch=300, start=100)
    2.0
    """
    _kappa(batch, start)
    if not (math.isfinite(trace) and math.isfinite(grad_sq)):
        raise InvalidSetting(
            f"trace={trace} and grad_sq={grad_sq} are not both finite; keep the last gain"
        )
    if grad_sq <= 0:
        return None
    noise = max(trace, 0.0)
    return (noise / start + grad_sq) / (noise / batch + grad_sq)


def gain_within(gain: float, kappa: float) -> float:
    """Return the nearest gain that is possible: between 1 and kappa.

    >>> gain_within(6.9, kappa=2.0), gain_within(1.0, kappa=0.5), gain_within(0.1, kappa=0.5)
    (2.0, 1.0, 0.5)
    """
    return min(max(gain, min(1.0, kappa)), max(1.0, kappa))


def steady_gain(previous: float, new: float | None, clipped_share: float = 0.0) -> float:
    """Return the gain to use: the new one, or the previous where the new one says nothing.

    It says nothing where it is not known, and where more than a fifth of the last steps had
    their gradient clipped.

    >>> steady_gain(1.5, 2.0), steady_gain(1.5, None), steady_gain(1.5, 2.0, clipped_share=0.3)
    (2.0, 1.5, 1.5)
    """
    if not 0 <= clipped_share <= 1:
        raise InvalidSetting(
            f"clipped_share={clipped_share} is not between 0 and 1; "
            "divide the clipped steps by all steps"
        )
    return previous if new is None or clipped_share > CLIPPED_SHARE else new


def ramp(old: float, new: float, steps_since: int, momentum: float) -> float:
    """Return the factor on the way from old to new, `steps_since` steps after a change.

    It moves in a straight line over the 1 / (1 - m) steps that momentum m remembers, so that the
    velocity follows; without momentum it is new at once.

    >>> [round(ramp(1.0, 2.0, step, momentum=0.75), 2) for step in range(5)]
    [1.25, 1.5, 1.75, 2.0, 2.0]
    """
    if not 0 <= momentum < 1:
        raise InvalidSetting(f"momentum={momentum} is not from 0 to below 1; give such a number")
    if steps_since < 0:
        raise InvalidSetting(f"steps_since={steps_since} is below 0; count from the change on")
    done = (steps_since + 1) * (1 - momentum)
    # 10 steps of 1 - 0.9 fall short of 1 by rounding.
    return new if done >= 1 - 1e-9 else old + (new - old) * done


def _kappa(batch: float, start: float) -> float:
    if not (0 < batch < math.inf and 0 < start < math.inf):
        raise InvalidSetting(
            f"batch={batch} and start={start} are not both above 0 and finite; give global batches"
        )
    return batch / start


def _known(gain: float | None, kappa: float) -> float:
    if gain is None:
        raise InvalidSetting(
            'rule="adascale" needs a gain, and it is not known yet; '
            "keep the last one, 1 in the beginning"
        )
    if not 0 < gain < math.inf:
        raise InvalidSetting(f"gain={gain} is not above 0 and finite; keep the last gain")
    return gain_within(gain, kappa)
