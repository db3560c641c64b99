"""Columns of the tables that commands print."""

from rich.table import Column


def right(*headings: str) -> list[Column]:
    """Return columns of numbers."""
    return [Column(heading, justify="right", no_wrap=True) for heading in headings]
