"""A finished draft in the forms that other engines read."""
