"""Arrays and other values: their layout, their encoding, and live arrays."""
