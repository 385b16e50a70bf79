"""What the layers of each model family compute: one file a family, and the words that they share."""
