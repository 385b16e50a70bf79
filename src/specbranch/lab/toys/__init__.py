"""Toy models with known distributions."""
