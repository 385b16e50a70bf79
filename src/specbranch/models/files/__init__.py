"""What a model is and where its weights lie: architectures, weight files, the store of known models."""
