"""What the models of a pair cost on this machine, measured."""
