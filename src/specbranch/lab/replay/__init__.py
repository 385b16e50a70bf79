"""Replays: a target's recorded text, decoded again by any method, on any clock, mostly without the models."""
