"""The extension that cffi makes of csrc/, as far as types go: both names are dynamic."""

from typing import Any

ffi: Any
lib: Any
