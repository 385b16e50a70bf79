"""Steps on a GPU: packing, attention by positions, the forward and its CUDA graphs."""
