"""The archive of stores: every version, on every level, in few files."""
