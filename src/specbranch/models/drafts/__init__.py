"""Drafts that share parts with their target: folders read and loaded."""
