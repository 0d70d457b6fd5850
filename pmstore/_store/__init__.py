"""Opening a store; the mapping from names to values; transactions, figures and checks."""
