"""A check of the installation and a pair, and the speedup to expect."""
