"""Watching a plain DistributedDataParallel training: clocks are read, nothing is changed."""
