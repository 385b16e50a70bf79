"""A modelled clock: time charged by a cost profile."""
