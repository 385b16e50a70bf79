"""Runners on torch: the native decoder, and any model of transformers."""
