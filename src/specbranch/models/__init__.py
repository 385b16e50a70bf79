"""Models on torch: loading, the native decoder of the Llama family, a runner for any transformers model, sampling."""
