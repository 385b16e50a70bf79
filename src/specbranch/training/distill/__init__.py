"""Distillation of drafts: the target's own text, training, and agreement."""
