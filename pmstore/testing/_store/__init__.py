"""Crashes of stores: recorded, explored, judged, shrunk, described and kept."""
