"""Crashes of stores: recorded, explored, evaluated, shrunk, described and kept."""
