"""H-RAD: a small network that foretells from the target's hidden states how much of the next draft will be taken."""
