"""The kinds of entries in the catalog. The core stores the number, and does not know its meaning.

======  ======  =================================  ==============================================
kind    number  meta of the entry                  extent
======  ======  =================================  ==============================================
array   1       its layout (see _values/array.py)  the elements, then perhaps the layout's tail
inline  2       the encoded value (_values)        none
blob    3       the name of the value's type       the encoded value
list    4       the list's id, 8 bytes             none; elements have keys of their own (names.py)
derived 5       its declaration (declaration.py)   none; or the declaration, if it is too long for the meta
object  6       id, parts, type (objects.py)       none; parts have keys of their own (names.py)
======  ======  =================================  ==============================================
"""

from __future__ import annotations

__all__ = ["ARRAY", "BLOB", "DERIVED", "INLINE", "LIST", "OBJECT"]

ARRAY, INLINE, BLOB, LIST, DERIVED, OBJECT = 1, 2, 3, 4, 5, 6
