"""Engines: observations in, plans and new state out. They never measure, send or apply."""
