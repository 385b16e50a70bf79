"""Benchmarks: paired runs of decoding methods, by the wall clock or by a modelled clock, and their reports."""
