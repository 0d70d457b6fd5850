"""Every small change of a C file's functions: operators over its tokens, of which nobody chose one.

A unit is a text that can be replaced as a whole, and so be chosen at run time: a simple statement, a condition, a value
of a declaration or of a loop. A change replaces one token of a unit, or all of it. What does not compile is left out
later (tests/mutants_lines.py), so the operators need not know types.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

TOKEN = re.compile(
    r"""(?P<gap>\s+|/\*.*?\*/|//[^\n]*|\#(?:\\\n|[^\n])*)
    |(?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
    |(?P<number>(?:0[xX][0-9a-fA-F]+|\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)[uUlLfF]*)
    |(?P<name>[A-Za-z_]\w*)
    |(?P<sign><<=|>>=|\.\.\.|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|.)""",
    re.DOTALL | re.VERBOSE,
)
OPEN, CLOSE = {"(": ")", "[": "]", "{": "}"}, {")", "]", "}"}
TYPE_WORDS = {
    "const", "volatile", "unsigned", "signed", "int", "char", "short", "long", "float", "double",
    "bool", "void", "struct", "union", "_Atomic",
}  # fmt: skip
# What is no expression, or can't be chosen at run time.
SKIPPED_WORDS = {"enum", "typedef", "static", "_Static_assert", "extern", "goto"}
# The calls whose arguments are words for people; and those that are there for bugs only.
TEXT_CALLS = {"pm_fail", "pm_fail_errno"}
CHECKS = {"PM_CHECK"}

BINARY = {
    "<": ("<=",),
    "<=": ("<",),
    ">": (">=",),
    ">=": (">",),
    "==": ("!=",),
    "!=": ("==",),
    "&&": ("||",),
    "||": ("&&",),
    "+": ("-",),
    "-": ("+",),
    "*": ("/",),
    "/": ("*",),
    "%": ("/",),
    "&": ("|",),
    "|": ("&",),
    "^": ("|",),
    "<<": (">>",),
    ">>": ("<<",),
}
ASSIGNING = {
    "+=": ("-=", "="),
    "-=": ("+=", "="),
    "|=": ("&=", "="),
    "&=": ("|=", "="),
    "<<=": (">>=",),
    ">>=": ("<<=",),
    "++": ("--",),
    "--": ("++",),
}
NAMES = {"true": ("false",), "false": ("true",), "break": ("continue",), "continue": ("break",)}


class Token(NamedTuple):
    kind: str
    text: str
    start: int
    end: int


class Unit(NamedTuple):
    """kind: "statement" with its ";", "condition" or "value". last: of the function's own block."""

    kind: str
    function: str
    status: bool
    start: int
    end: int
    tokens: tuple[Token, ...]
    last: bool = False


class Change(NamedTuple):
    """A mutant that nobody chose: the text from `start` to `end` is replaced by `new`.

    line: of what is changed. at: the text of the line where the unit begins, which tests/mutants_cover.json quotes.
    """

    file: str
    function: str
    line: int
    operator: str
    start: int
    end: int
    old: str
    new: str
    at: str

    def shown(self) -> str:
        return f"{' '.join(self.old.split())}  →  {' '.join(self.new.split()).replace('(void)0;', '(deleted)')}"


def tokens_of(text: str) -> list[Token]:
    """Without spaces, comments and lines of the preprocessor."""
    found = (Token(m.lastgroup or "", m[0], m.start(), m.end()) for m in TOKEN.finditer(text))
    return [token for token in found if token.kind != "gap"]


class Parser:
    """Statements of functions. What it does not understand it passes over."""

    def __init__(self, text: str) -> None:
        self.tokens = tokens_of(text)
        self.units: list[Unit] = []
        self.function = ""
        self.status = False

    def closing(self, at: int) -> int:
        """The index of the bracket that closes the one at `at`."""
        depth = 0
        for i in range(at, len(self.tokens)):
            depth += self.tokens[i].text in OPEN and self.tokens[i].kind == "sign"
            depth -= self.tokens[i].text in CLOSE and self.tokens[i].kind == "sign"
            if not depth:
                return i
        raise ValueError("a bracket is not closed")

    def until(self, at: int, signs: str, end: int) -> int:
        """The index of the first of these signs outside brackets, or `end`."""
        while at < end and self.tokens[at].text not in signs.split():
            at = self.closing(at) + 1 if self.tokens[at].text in OPEN else at + 1
        return min(at, end)

    def parse(self) -> list[Unit]:
        at = header = 0
        while at < len(self.tokens):
            text = self.tokens[at].text
            if text == "{":
                end = self.closing(at)
                words = [token.text for token in self.tokens[header:at]]
                if words[-1:] == [")"] and words[0] not in ("typedef", "struct", "union", "enum") and "=" not in words:
                    self.of_function(words, at, end)
                at = end
            at += 1
            if text in (";", "{"):
                header = at
        return self.units

    def of_function(self, words: Sequence[str], at: int, end: int) -> None:
        plain = re.sub(r"__attribute__ \( \(.*?\) \)", "", " ".join(words)).split()
        self.function = plain[plain.index("(") - 1]
        self.status = "pm_status" in plain[: plain.index("(")] and "*" not in plain[: plain.index("(")]
        first = len(self.units)
        self.statement(at)
        if len(self.units) > first and self.tokens[end - 1].end == self.units[-1].end:
            self.units[-1] = self.units[-1]._replace(last=True)

    def add(self, kind: str, at: int, end: int) -> None:
        tokens = tuple(self.tokens[at:end])
        if tokens and not all(token.kind == "string" for token in tokens):
            self.units.append(Unit(kind, self.function, self.status, tokens[0].start, tokens[-1].end, tokens))

    def statement(self, at: int) -> int:
        """Index behind the statement at `at`."""
        word = self.tokens[at].text
        if word == "{":
            end = self.closing(at)
            at += 1
            while at < end:
                at = self.statement(at)
            return end + 1
        if word in ("if", "while", "switch"):
            end = self.closing(at + 1)
            self.add("value" if word == "switch" else "condition", at + 2, end)
            at = self.statement(end + 1)
            if word == "if" and self.tokens[at].text == "else":
                at = self.statement(at + 1)
            return at
        if word == "for":
            return self.for_loop(at)
        if word == "do":
            at = self.statement(at + 1)
            end = self.closing(at + 1)
            self.add("condition", at + 2, end)
            return end + 2
        if word in ("case", "default") or (self.tokens[at].kind == "name" and self.tokens[at + 1].text == ":"):
            return self.until(at, ":", len(self.tokens)) + 1
        end = self.until(at, ";", len(self.tokens))
        if word in SKIPPED_WORDS or word == ";":
            return end + 1
        blocks = [i for i in range(at + 1, end) if self.tokens[i].text == "{" and self.tokens[i - 1].text == ")"]
        if word.isupper() and self.tokens[at + 1].text == "(" and self.closing(at + 1) + 1 in blocks:
            return self.statement(self.closing(at + 1) + 1)  # a macro that is a loop
        if self.declares(at, end):
            self.declaration(at, end)
        else:
            self.add("statement", at, end + 1)
        return end + 1

    def for_loop(self, at: int) -> int:
        close = self.closing(at + 1)
        first = self.until(at + 2, ";", close)
        second = self.until(first + 1, ";", close)
        if self.declares(at + 2, first):
            self.declaration(at + 2, first)
        else:
            self.add("value", at + 2, first)
        self.add("condition", first + 1, second)
        self.add("value", second + 1, close)
        return self.statement(close + 1)

    def declares(self, at: int, end: int) -> bool:
        words = self.tokens[at:end]
        if not words or words[0].kind != "name" or words[0].text in ("return", "sizeof"):
            return False
        if words[0].text in TYPE_WORDS:
            return True
        i = 1
        while i < len(words) and (words[i].text == "*" or words[i].text in TYPE_WORDS):
            i += 1
        behind = words[i + 1].text if i + 1 < len(words) else ";"
        return i < len(words) and words[i].kind == "name" and behind in ("=", ",", "[", ";", "__attribute__")

    def declaration(self, at: int, end: int) -> None:
        while at < end:
            place = self.until(at, "= ,", end)
            if place < end and self.tokens[place].text == "=":
                at = self.until(place + 1, ",", end)
                self.value(place + 1, at)
            else:
                at = place
            at += 1

    def value(self, at: int, end: int) -> None:
        if at >= end or self.tokens[at].text != "{":
            self.add("value", at, end)
            return
        close = self.closing(at)
        at += 1
        while at < close:
            comma = self.until(at, ",", close)
            named = self.until(at, "=", comma)
            self.value(named + 1 if named < comma else at, comma)
            at = comma + 1


def units_of(text: str) -> list[Unit]:
    """What can be replaced, in the order of the file. Units do not overlap."""
    return Parser(text).parse()


def replacements(unit: Unit) -> Iterator[tuple[str, Token, str]]:
    """Operator, token and what stands there instead."""
    silent_until = -1
    for i, token in enumerate(unit.tokens):
        if token.text in TEXT_CALLS and unit.tokens[i + 1].text == "(":
            depth = 0
            for other in unit.tokens[i + 1 :]:
                depth += (other.text == "(") - (other.text == ")")
                if not depth:
                    silent_until = other.start
                    break
        if token.start <= silent_until:
            continue
        before = unit.tokens[i - 1] if i else None
        binary = before is not None and (
            (before.kind in ("name", "number") and before.text not in ("return", "sizeof")) or before.text in (")", "]")
        )
        if token.kind == "sign" and token.text in BINARY and (binary or token.text not in "+-*&"):
            for new in BINARY[token.text]:
                yield "operator", token, new
        elif token.kind == "sign" and token.text in ASSIGNING:
            for new in ASSIGNING[token.text]:
                yield "assignment", token, new
        elif token.kind == "sign" and token.text in "!~" and not binary:
            yield "negation dropped", token, ""
        elif token.kind == "name" and token.text in NAMES:
            for new in NAMES[token.text]:
                yield "jump" if token.text in ("break", "continue") else "constant", token, new
        elif token.kind == "number":
            yield "constant + 1", token, f"({token.text} + 1)"
            if token.text.strip("uUlL") not in ("0", "0x0"):
                yield "constant - 1", token, f"({token.text} - 1)"


def whole(unit: Unit, text: str) -> Iterator[tuple[str, str]]:
    """Operator, and what stands in the place of the unit."""
    old = text[unit.start : unit.end]
    first = unit.tokens[0].text
    if unit.kind == "condition":
        yield "condition negated", f"!({old})"
    if unit.kind != "statement":
        return
    if first == "PM_TRY":
        yield "error ignored", "(void)" + old[len("PM_TRY") :]
    if first == "return" and unit.status and old.split() != ["return", "PM_OK;"]:
        yield "status dropped", "return PM_OK;"
    if first not in ("break", "continue") and not (unit.last and first == "return" and len(unit.tokens) > 2):
        yield "statement deleted", "(void)0;"


def changes_of(file: str, text: str) -> Iterator[Change]:
    """All mutants of a C file, in its order."""
    lines = text.split("\n")
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line) + 1)

    def line_of(place: int) -> int:
        return text.count("\n", 0, place) + 1

    for unit in units_of(text):
        if unit.tokens[0].text in CHECKS:
            continue
        old = text[unit.start : unit.end]
        at = lines[line_of(unit.start) - 1].strip()
        seen = {old}
        for operator, token, instead in replacements(unit):
            new = text[unit.start : token.start] + instead + text[token.end : unit.end]
            if new not in seen:
                seen.add(new)
                yield Change(file, unit.function, line_of(token.start), operator, unit.start, unit.end, old, new, at)
        for operator, new in whole(unit, text):
            if new not in seen:
                seen.add(new)
                yield Change(file, unit.function, line_of(unit.start), operator, unit.start, unit.end, old, new, at)
