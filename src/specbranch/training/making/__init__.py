"""The jobs that train a draft or a predictor and write its folder."""
