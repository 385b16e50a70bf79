"""Fleets on a virtual clock: replicas of a target, draft workers they share, and the network between them."""
