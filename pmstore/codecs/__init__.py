"""Codecs of pmstore for numcodecs, and for `Store.drain`: docs/lossy.md and docs/archive.md.

It needs numcodecs, which ``pip install 'pmstore[archive]'`` brings.
"""

from pmstore._errors import refuse_without

try:
    from pmstore.codecs._lcdelta import LCDelta
    from pmstore.codecs._planes import Planes
except ModuleNotFoundError as error:
    refuse_without("numcodecs", error, "pmstore.codecs needs numcodecs: pip install 'pmstore[archive]'")
    raise

__all__ = ["LCDelta", "Planes"]
