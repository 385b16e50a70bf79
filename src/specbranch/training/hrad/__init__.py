"""H-RAD: rounds collected, a predictor trained and judged."""
