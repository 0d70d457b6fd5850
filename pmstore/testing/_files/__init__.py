"""Crashes of any program's files: recorded, modelled, explored, evaluated and kept."""
