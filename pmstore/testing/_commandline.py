"""Commands that are given as one text: split into words without a shell, and refused where only a shell would do."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Collection

from pmstore.testing._errors import CrashTestError

__all__ = ["need_asserts", "split_command"]

OPERATORS = "|&;<>"


def split_command(text: str, option: str, placeholders: Collection[str]) -> list[str]:
    """The words of a command; CrashTestError, which names the option, where these can't be what was meant.

    Parameters
    ----------
    text : str
        The command as the user wrote it, with quotes.
    option : str
        What it was given to, for the message: ``--check``.
    placeholders : collection of str
        The names that stand for something in it, without braces. They are not replaced here. A word with spaces in it
        is a script of some language, whose braces are its own.
    """
    operator = _operator(text)
    if operator:
        raise CrashTestError(
            f"{option}: no shell is used, and {operator} would be a word like any other: let one run it, "
            f"{option} \"sh -c '…'\""
        )
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise CrashTestError(f"{option}: {str(error)[0].lower()}{str(error)[1:]}: {text}") from error
    if not words:
        raise CrashTestError(f"{option}: the command is empty")
    for word in words:
        for name in re.findall(r"\{([A-Za-z_]\w*)\}", word) if not re.search(r"\s", word) else ():
            if name not in placeholders:
                known = " and ".join(f"{{{each}}}" for each in placeholders)
                raise CrashTestError(f"{option}: nothing is put in for {{{name}}}, only for {known}: {text}")
    return words


def _operator(text: str) -> str | None:
    """The first shell operator that is neither quoted nor escaped."""
    quote, at = "", 0
    while at < len(text):
        letter = text[at]
        if letter == "\\" and quote != "'":
            at += 1
        elif quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in OPERATORS:
            found = re.match(rf"[{OPERATORS}]+", text[at:])
            return found[0] if found else letter
        at += 1
    return None


def need_asserts() -> None:
    """CrashTestError if this Python leaves asserts out: a check that is made of them would accept everything."""
    if sys.flags.optimize:
        raise CrashTestError("Python runs without asserts here (-O): a check of asserts sees nothing")
