"""Codecs of pmstore for numcodecs, and for `Store.drain`: docs/lossy.md.

It needs numcodecs, which ``pip install 'pmstore[archive]'`` brings.
"""

from pmstore.codecs._lcdelta import LCDelta

__all__ = ["LCDelta"]
