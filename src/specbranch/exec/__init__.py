"""Workers, which hold a model, and executors, which run both workers serially or at the same time."""
