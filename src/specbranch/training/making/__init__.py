"""What is made for a target and kept in a folder, from names alone: drafts, predictors, models in larger shapes."""
