"""Prompts to run benches on: suites that ship, public ones, and texts that lengthen them."""
