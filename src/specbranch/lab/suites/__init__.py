"""Prompts for benchmarks: shipped suites, public ones, and filler text for long contexts."""
