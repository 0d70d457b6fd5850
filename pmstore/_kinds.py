"""The kinds of entries in the catalog. The core keeps the number, and does not know what it means.

======  ======  =================================  ==============================================
kind    number  meta of the entry                  extent
======  ======  =================================  ==============================================
array   1       its layout (see _array)            the elements, then perhaps the layout's tail
inline  2       the encoded value (see _values)    none
blob    3       the name of the value's type       the encoded value
list    4       the list's id, 8 bytes             none; elements have keys of their own (_names)
derived 5       its declaration (see _declaration) none; or the declaration, if it is too long for the meta
======  ======  =================================  ==============================================
"""

from __future__ import annotations

__all__ = ["ARRAY", "BLOB", "DERIVED", "INLINE", "LIST"]

ARRAY, INLINE, BLOB, LIST, DERIVED = 1, 2, 3, 4, 5
