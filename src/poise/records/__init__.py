"""Records of a training: versioned rows as JSON lines, written, read and replayed."""

from poise.records.file import Recorder, read_record
from poise.records.replay import Difference, replay
from poise.records.rows import Header, Record, Row

__all__ = ["Difference", "Header", "Record", "Recorder", "Row", "read_record", "replay"]
