"""Derived arrays: functions of other values, which are recomputed rather than logged."""
