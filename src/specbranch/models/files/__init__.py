"""Model files: architectures, weight files and their formats, the store of models known by name."""
