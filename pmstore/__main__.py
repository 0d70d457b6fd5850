"""``python -m pmstore``: the command line, see ``pmstore._cli``."""

import sys

from pmstore._cli import main

if __name__ == "__main__":
    sys.exit(main())
