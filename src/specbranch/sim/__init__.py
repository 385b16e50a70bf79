"""Toy models with known laws, and an executor with a virtual clock: methods and policies without a GPU."""
