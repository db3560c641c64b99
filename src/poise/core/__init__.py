"""Pure functions and values: no clock, no randomness, no files, no framework."""
