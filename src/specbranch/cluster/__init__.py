"""Several processes or machines as one server, by Ray: replicas behind one address."""
