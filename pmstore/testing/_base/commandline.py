"""Commands that are given as one text. They are split into words without a shell, and refused if they need a shell."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Collection

from pmstore.testing._base.errors import CrashTestError

__all__ = ["need_asserts", "split_command"]

OPERATORS = "|&;<>"


def split_command(text: str, option: str, placeholders: Collection[str]) -> list[str]:
    """The words of a command. Raises CrashTestError, which names the option, if the user must have meant something
    else.

    Parameters
    ----------
    text : str
        The command as the user wrote it, with quotes.
    option : str
        The option with that command, for the message: ``--check``.
    placeholders : collection of str
        The names that the command may contain in braces, given without braces. They are not replaced here. A word that
        contains spaces is taken for a script, which may use braces itself.
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
    """Raises CrashTestError if this Python leaves asserts out: a check that consists of them would accept
    everything."""
    if sys.flags.optimize:
        raise CrashTestError("Python runs without asserts here (-O): a check of asserts sees nothing")
