"""Toy models with known laws."""
