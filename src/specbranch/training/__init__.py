"""Training of drafts and predictors for a target. The engine imports nothing from it."""
