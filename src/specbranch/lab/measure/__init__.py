"""The costs of a pair's models on this machine, measured."""
