"""Codecs of pmstore for numcodecs, and for `Store.drain`: docs/lossy.md and docs/archive.md.

It needs numcodecs, which ``pip install 'pmstore[archive]'`` brings.
"""

from pmstore.codecs._lcdelta import LCDelta
from pmstore.codecs._planes import Planes

__all__ = ["LCDelta", "Planes"]
