"""Prints requirements that install the oldest supported versions of pmstore's dependencies, for `make oldest`."""

import re
from importlib.metadata import requires

EXTRAS = ("sklearn", "rich", "testing", "watch", "plot", "archive", "test")

oldest = set()
for requirement in requires("pmstore") or ():
    what, _, condition = (part.strip() for part in requirement.partition(";"))
    if what.startswith("pmstore") or (condition and not any(f'"{extra}"' in condition for extra in EXTRAS)):
        continue
    oldest.add(re.sub(r">=([^,]+).*", r"==\1", what))
print(*sorted(oldest))
