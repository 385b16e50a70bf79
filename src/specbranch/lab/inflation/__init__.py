"""A small model in the shape of a larger one."""
