"""Names, and the values that the core's entries hold under them."""
