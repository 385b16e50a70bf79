"""Drafts and predictors for a target. The engine imports nothing of it."""
