"""Decoding from records: what a target said once, decoded again by any method, on any clock, mostly without the
models."""
