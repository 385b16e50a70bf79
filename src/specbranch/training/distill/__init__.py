"""Drafts for a target: how well one agrees with it, and what it costs."""
