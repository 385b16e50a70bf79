"""Steps on GPUs: graphs over the plain decoder."""
