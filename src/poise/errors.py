"""Every exception Poise raises, on one screen.

PoiseError
├── InvalidSetting      an argument, loader, model or policy that cannot be used as it is
├── InfeasibleSplit     a global batch that cannot be split over these workers
├── Disagreement        workers that should be alike are not
├── OutOfOrder          a call that comes at the wrong moment
├── StateMismatch       a saved state that does not belong to this training
├── WorkerLost          another worker failed, died or hung
└── ServerLost          the server that this worker trains with is gone

PoiseWarning            something that works, but perhaps not as expected

A message says what was found, what is required, and what to do.
"""


class PoiseError(Exception):
    """Root of all errors that Poise raises on purpose."""


class InvalidSetting(PoiseError, ValueError):
    """An argument, loader, model or policy cannot be used as it is."""


class InfeasibleSplit(PoiseError, ValueError):
    """The global batch cannot be split over these workers."""


class Disagreement(PoiseError):
    """Workers that should be alike are not."""


class OutOfOrder(PoiseError, RuntimeError):
    """A call comes at a moment when it has no meaning."""


class StateMismatch(PoiseError, ValueError):
    """A saved state does not belong to this training."""


class WorkerLost(PoiseError, RuntimeError):
    """Another worker failed, died or hung; this one cannot go on alone."""


class ServerLost(PoiseError, RuntimeError):
    """The server that this worker trains with failed, died or cannot be reached."""


class PoiseWarning(UserWarning):
    """Something works, but perhaps not as expected."""
