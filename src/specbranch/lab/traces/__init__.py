"""Traces of one answer, round by round: the fate of every drafted token, and when each model worked."""
