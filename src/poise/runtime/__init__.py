"""One training in one process, without a framework: what every adapter stands on."""
