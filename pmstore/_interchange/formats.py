"""The formats, by name and by what a path ends in."""

from __future__ import annotations

import os

from pmstore._interchange.hdf5 import Hdf5
from pmstore._interchange.npz import Npz
from pmstore._interchange.safetensors import Safetensors
from pmstore._interchange.source import Format
from pmstore._interchange.zarr import Zarr

__all__ = ["FORMATS", "format_of"]

_FORMATS: dict[str, Format] = {"zarr": Zarr(), "npz": Npz(), "safetensors": Safetensors(), "hdf5": Hdf5()}
_ENDS = {"h5": "hdf5", "he5": "hdf5", **{name: name for name in _FORMATS}}
_ENDS_TO_READ = {**_ENDS, "nc": "hdf5", "nc4": "hdf5"}  # netCDF-4 is HDF5 with rules that an export does not follow
FORMATS = tuple(_FORMATS)


def format_of(path: str, format: str | None, *, reads: bool) -> Format:
    """The format of this name or, for None, of this end of the path, in letters of any case. Raises ValueError."""
    known = ", ".join(_FORMATS)
    if format is None:
        known_ends = _ENDS_TO_READ if reads else _ENDS
        format = known_ends.get(os.path.splitext(path.rstrip("/"))[1][1:].lower())
        if format is None:
            ends = ", ".join(f".{end}" for end in known_ends)
            raise ValueError(f"{path!r} ends in no format: a name ends in one of {ends}, or format= is one of {known}")
    if format not in _FORMATS:
        raise ValueError(f"the format {format!r} is none of {known}")
    return _FORMATS[format]
