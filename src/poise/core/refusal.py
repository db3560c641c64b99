"""Arrays over workers with an entry that cannot be."""

from poise.core.timing import Flags, Floats
from poise.errors import InvalidSetting


def refuse(wrong: Flags, values: Floats, name: str, required: str) -> None:
    """Raise, naming the first worker whose entry is wrong, and what is required."""
    if wrong.any():
        worker = int(wrong.argmax())
        raise InvalidSetting(f"{name}[{worker}] is {values[worker]}; give {required}")
