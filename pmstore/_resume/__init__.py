"""The common parts of fits that resume: the loop, their state, and their fit group in a store."""
