"""Codecs of pmstore for numcodecs, and for `Store.drain`: docs/lossy.md and docs/archive.md.

It needs numcodecs, which ``pip install 'pmstore[archive]'`` brings.
"""

try:
    from pmstore.codecs._lcdelta import LCDelta
    from pmstore.codecs._planes import Planes
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "numcodecs":
        raise
    raise ModuleNotFoundError(
        "pmstore.codecs needs numcodecs: pip install 'pmstore[archive]'", name=error.name
    ) from error

__all__ = ["LCDelta", "Planes"]
