"""The compiled steps for few rows on CPUs: matrix products, small operations, and the running of a whole step as
machine code."""
