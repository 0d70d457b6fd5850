"""Scales of HDF5, which name the axes of datasets, and netCDF-4: HDF5 in which each dimension is a scale."""

from __future__ import annotations

import contextlib
from typing import Any

__all__ = ["NUMBERED", "OF_NETCDF", "SCALES", "Netcdf", "address", "has_length_only", "is_scale", "last_part", "shown"]

SCALES = "DIMENSION_LIST"  # the attribute by which a dataset refers to the scales of its axes
NUMBERED = "_Netcdf4"  # how the names of netCDF's own attributes begin
OF_NETCDF = {"_NCProperties", "_nc3_strict"}
"""Attributes of a file of netCDF-4. Older libraries wrote neither."""

_USERS = "REFERENCE_LIST"  # the attribute by which a scale refers to its datasets, and their axes
_NUMBER, _NUMBERS = "_Netcdf4Dimid", "_Netcdf4Coordinates"  # of a dimension; of those of a scale with several axes
_ONLY_LENGTH = "This is a netCDF dimension but not a netCDF variable"  # how the NAME of such a scale begins
_NO_COORDINATE = "_nc4_non_coord_"  # stands before the name of a variable if a dimension that it lacks has this name
_DAMAGE = (AttributeError, IndexError, KeyError, OSError, RuntimeError, TypeError, ValueError)


def address(h5py: Any, member: Any) -> tuple[int, Any]:
    """The place of a group or dataset, which is the same for all of its names."""
    about = h5py.h5o.get_info(member.id)
    return about.fileno, about.addr


def is_scale(h5py: Any, member: Any) -> bool:
    """Whether a dataset is a scale, which has the coordinates along an axis of other datasets."""
    return isinstance(member, h5py.Dataset) and _words(member, "CLASS") == "DIMENSION_SCALE"


def has_length_only(h5py: Any, member: Any) -> bool:
    """Whether it is netCDF's way to keep the length of a dimension without coordinates."""
    return is_scale(h5py, member) and _words(member, "NAME").startswith(_ONLY_LENGTH)


def shown(name: str | bytes) -> str:
    """A name. h5py gives bytes if it is not in UTF-8."""
    return name.decode(errors="backslashreplace") if isinstance(name, bytes) else name


def last_part(member: Any) -> str:
    """The name of a dataset in its group."""
    return shown(member.name or "").rpartition("/")[2]


class Netcdf:
    """The contents of a file of HDF5 as netCDF's library shows them.

    Attributes
    ----------
    is_one : bool
        Whether netCDF's library wrote the file. If not, its contents are what HDF5 shows.
    """

    def __init__(self, h5py: Any, file: Any) -> None:
        self._h5py = h5py
        self._lengths: dict[Any, int] = {}  # of unlimited dimensions, by the address of the scale
        self._dimensions: dict[int, Any] = {}  # the scale of each dimension that has a number
        self._with_axes: list[Any] = []  # scales with several axes
        self.is_one = not OF_NETCDF.isdisjoint(file.attrs)
        file.visititems(self._note)

    def _note(self, name: str, member: Any) -> None:
        if not is_scale(self._h5py, member):
            return
        with contextlib.suppress(*_DAMAGE):
            self._dimensions.setdefault(int(member.attrs[_NUMBER]), member)
            self.is_one = True
        self.is_one |= has_length_only(self._h5py, member)
        if len(member.shape or ()) > 1:
            self._with_axes.append(member)

    def name(self, group: Any, part: str) -> str:
        """The name of a member of a group."""
        bare = part.removeprefix(_NO_COORDINATE)
        if not self.is_one or part == bare:
            return part
        if not isinstance(group.get(bare, getlink=True), self._h5py.HardLink):
            return part
        return bare if has_length_only(self._h5py, group[bare]) else part

    def axes(self, member: Any) -> list[str]:
        """The name of each axis of a scale; "" if it has none."""
        try:
            names = [last_part(scale) for scale in self._scales(member)]
        except _DAMAGE:
            names = []
        return names if len(names) == member.ndim else [""] * member.ndim

    def shape(self, member: Any) -> tuple[int, ...]:
        """The shape of a dataset: an unlimited axis is as long as in the longest variable."""
        shape: tuple[int, ...] = member.shape
        if not self.is_one or None not in member.maxshape:
            return shape
        try:
            found = [self._length(scale) for scale in self._scales(member)]
            return tuple(
                n if most is not None else max(n, whole)
                for n, most, whole in zip(shape, member.maxshape, found, strict=True)
            )
        except _DAMAGE:  # no scales
            return shape

    def _scales(self, member: Any) -> list[Any]:
        """The scale of each axis."""
        if not is_scale(self._h5py, member):
            return [member.file[one[0]] for one in member.attrs[SCALES]]
        if member.ndim == 1:
            return [member]
        return [self._dimensions[int(number)] for number in member.attrs[_NUMBERS]]

    def _length(self, scale: Any) -> int:
        place = address(self._h5py, scale)
        if place not in self._lengths:
            users = [(scale.file[one], axis) for one, axis in scale.attrs.get(_USERS, ())]
            for one in self._with_axes:  # they refer to no scale
                with contextlib.suppress(*_DAMAGE):
                    places = [address(self._h5py, other) for other in self._scales(one)]
                    users += [(one, axis) for axis, other in enumerate(places) if other == place]
            self._lengths[place] = max([scale.shape[0], *(one.shape[axis] for one, axis in users)])
        return self._lengths[place]


def _words(member: Any, key: str) -> str:
    """The text of an attribute; "" if there is none, or if it is no text."""
    try:
        found = member.attrs.get(key, "")
    except (TypeError, ValueError):
        return ""
    found = found.decode(errors="replace") if isinstance(found, bytes) else found
    return found if isinstance(found, str) else ""
