"""The lab: benchmarks, replays, measured costs and theory. The engine imports nothing from it."""
