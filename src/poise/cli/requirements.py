"""What a command needs beyond the base install."""

from importlib.util import find_spec

from poise.errors import InvalidSetting


def require(*modules: str, extra: str) -> None:
    """Raise, naming the extra to install, unless all modules can be imported."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise InvalidSetting(
            f"{' and '.join(missing)} cannot be imported, but this command needs it; "
            f'run: pip install "poise[{extra}]"'
        )
