"""H-RAD: collect rounds, train a predictor and evaluate it."""
