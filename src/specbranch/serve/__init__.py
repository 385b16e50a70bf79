"""An OpenAI-compatible server over an AsyncLLM: `specbranch serve`."""
