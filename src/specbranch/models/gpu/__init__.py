"""Decode steps on a GPU: packed inputs, attention kernels, the forward and its CUDA graphs."""
