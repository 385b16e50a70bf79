"""Compiled decode steps on CPUs: matrix products, small operations, and a whole step as machine code."""
