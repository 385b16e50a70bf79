"""Models on torch: the native decoder for the Llama family, a runner over any transformers model, weights and
sampling."""
