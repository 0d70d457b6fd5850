"""Prints requirements that install the oldest versions that pmstore says it works with, for `make oldest`."""

import re
from importlib.metadata import requires

EXTRAS = ("sklearn", "rich", "testing", "test")
LINTERS = ("ruff", "mypy")  # nothing of pmstore's runs with them

oldest = set()
for requirement in requires("pmstore") or ():
    what, _, condition = (part.strip() for part in requirement.partition(";"))
    if what.startswith("pmstore") or (condition and not any(f'"{extra}"' in condition for extra in EXTRAS)):
        continue
    oldest.add(what if what.startswith(LINTERS) else re.sub(r">=([^,]+).*", r"==\1", what))
print(*sorted(oldest))
