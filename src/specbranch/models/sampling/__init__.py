"""Sampling: from rows of logits to tokens, proposals and verdicts."""
