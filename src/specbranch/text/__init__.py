"""Text in and out: tokenizers, chat templates, detokenization token by token, stop strings."""
