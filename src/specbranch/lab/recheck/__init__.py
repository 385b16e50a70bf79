"""Saved answers checked against plain decoding."""
