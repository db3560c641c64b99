"""Times and numbers for people."""

_DAY_S = 86_400.0
_UNITS = (
    (1e-3, "ms", 1.0),
    (1.0, "s", 120.0),
    (60.0, "min", 7200.0),
    (3600.0, "h", 2 * _DAY_S),
)
"""Seconds of a unit, its name, and the time up to which it is used."""


def duration(seconds: float) -> str:
    """Return a time for people, with three digits.

    >>> duration(0.0123), duration(1.0), duration(213.4), duration(8000.0), duration(3e5)
    ('12.3 ms', '1.00 s', '3.56 min', '2.22 h', '3.47 days')
    """
    for unit_s, unit, upto in _UNITS:
        if seconds < upto:
            return f"{three_digits(seconds / unit_s)} {unit}"
    return f"{three_digits(seconds / _DAY_S)} days"


def three_digits(value: float) -> str:
    """Return a number with three digits, or as a whole one.

    >>> three_digits(0.5), three_digits(12345.6)
    ('0.500', '12,346')
    """
    return f"{value:#.3g}".rstrip(".") if value < 1000 else f"{value:,.0f}"  # noqa: PLR2004
