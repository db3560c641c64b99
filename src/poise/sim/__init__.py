"""Virtual workers under a virtual clock, driven by the same engine as live training."""
