"""The shared parts of the package: errors, forks, scratch folders, the pytest session."""
