"""Training with a server: it holds weights and optimizer, and workers push gradients to it."""
