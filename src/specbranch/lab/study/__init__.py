"""The theoretical study: what speculation can gain, by formula, on toys and on a map of strategies."""
