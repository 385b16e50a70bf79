"""The forward: which rows a step has, the decoder's arithmetic, and the copies to a device and back."""
