"""Speculative decoding as bookkeeping: standard library only, no model is ever called from here."""
