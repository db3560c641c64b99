"""Real workers on one machine."""
