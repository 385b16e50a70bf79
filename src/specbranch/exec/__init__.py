"""Carrying orders out: workers that hold a model, and executors that run the workers one after the other or side by
side."""
