"""Checks the files of save.py after a crash: python check.py NAME DIRECTORY SAID; SAID: a file with the program's
output.

Exits with 0 if there is one whole version, and not an older one than the last that was printed as saved.
"""

from __future__ import annotations

import sys
from pathlib import Path

from save import SAVERS

if __name__ == "__main__":
    saver, directory, said = SAVERS[sys.argv[1]], Path(sys.argv[2]), Path(sys.argv[3]).read_text()
    acknowledged = int(said.split()[-1]) if said else 0
    found = saver.load(directory)
    if found < acknowledged:
        sys.exit(f"version {acknowledged} was said to be saved, version {found} is there")
