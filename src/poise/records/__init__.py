"""Records of a training: versioned rows as JSON lines, written, read and replayed."""

from poise.records.file import Recorder, read_record
from poise.records.replay import Difference, replay
from poise.records.rows import Header, Lost, Record, Row
from poise.records.series import Series, read_series, replay_series

__all__ = [
    "Difference",
    "Header",
    "Lost",
    "Record",
    "Recorder",
    "Row",
    "Series",
    "read_record",
    "read_series",
    "replay",
    "replay_series",
]
