"""The theoretical study: what speculation can gain, by formula, on toy models and on a map of strategies."""
