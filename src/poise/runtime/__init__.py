"""What one process of a training does that needs no framework."""
