"""Other engines on the same weights and prompts: transformers and llama.cpp."""
