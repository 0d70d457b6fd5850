"""The extension that cffi makes of the crash explorer and the tracer, as far as types go: both names are dynamic."""

from typing import Any

ffi: Any
lib: Any
