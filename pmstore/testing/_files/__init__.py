"""Crashes of any program's files: recorded, modelled, explored, judged and kept."""
