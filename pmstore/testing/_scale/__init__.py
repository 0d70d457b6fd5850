"""The crash explorer of MapReduce: coordinator, workers, messages and store in one process, in virtual time."""
