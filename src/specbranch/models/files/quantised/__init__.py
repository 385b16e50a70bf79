"""Checkpoints whose matrices are quantised in a public format: compressed-tensors, AWQ, GPTQ and FP8."""
