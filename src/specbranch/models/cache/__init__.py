"""The KV cache: the memory behind its pages, and how many pages fit."""
