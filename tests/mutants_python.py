"""Every small change of a Python module's functions: operators over its syntax tree, of which nobody chose one."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator

from tests.mutants_c import Change

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
SIMPLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Raise, ast.Return, ast.Delete, ast.Assert)
JUMPS = (ast.Break, ast.Continue)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Finder:
    """Walks over one module."""

    def __init__(self, file: str, text: str) -> None:
        self.file = file
        self.text = text
        self.lines = text.split("\n")
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line) + 1)

    def place(self, line: int, column: int) -> int:
        """In characters; the tree counts a line's bytes."""
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def find(self) -> Iterator[Change]:
        yield from self.block(ast.parse(self.text).body, "")

    def block(self, body: list[ast.stmt], function: str) -> Iterator[Change]:
        for statement in body:
            yield from self.statement(statement, function)

    def statement(self, node: ast.stmt, function: str) -> Iterator[Change]:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            name = f"{function}.{node.name}" if function else node.name
            yield from self.block(node.body, name)
            return
        inside = function and not function.rpartition(".")[2][:1].isupper()
        if inside and isinstance(node, (*SIMPLE, *JUMPS)):
            yield from self.simple(node, function)
        for field, value in ast.iter_fields(node):
            if field in ("body", "orelse", "finalbody"):
                yield from self.block(value, function)
            elif field in ("handlers", "cases"):
                for branch in value:
                    yield from self.block(branch.body, function)
            elif inside and field != "annotation":
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        yield from self.expressions(child, node, function)

    def change(self, node: ast.stmt | ast.expr, at: ast.stmt, function: str, operator: str, new: str) -> Change:
        assert node.end_lineno is not None and node.end_col_offset is not None
        start, end = self.place(node.lineno, node.col_offset), self.place(node.end_lineno, node.end_col_offset)
        if isinstance(node, ast.stmt):  # whole lines, with the comment behind
            rest = self.text[end : self.starts[node.end_lineno] - 1]
            if rest.strip().startswith("#"):
                end += len(rest)
        line = self.lines[at.lineno - 1].strip()
        return Change(self.file, function, node.lineno, operator, start, end, self.text[start:end], new, line)

    def simple(self, node: ast.stmt, function: str) -> Iterator[Change]:
        if isinstance(node, JUMPS):
            yield self.change(node, node, function, "jump", "continue" if isinstance(node, ast.Break) else "break")
            return
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return  # a docstring
        if isinstance(node, ast.Return):
            if node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None):
                yield self.change(node, node, function, "result dropped", "return None")
        else:
            yield self.change(node, node, function, "statement deleted", "pass")
        if isinstance(node, ast.AugAssign) and type(node.op) in OPERATORS:
            other = copy.deepcopy(node)
            other.op = OPERATORS[type(node.op)]()
            yield self.change(node, node, function, "assignment", ast.unparse(other))

    def expressions(self, node: ast.AST, at: ast.stmt, function: str) -> Iterator[Change]:
        if isinstance(node, (ast.JoinedStr, ast.Lambda)):
            return
        if isinstance(node, ast.expr):
            for operator, new in variants(node):
                yield self.change(node, at, function, operator, new)
        for child in ast.iter_child_nodes(node):
            yield from self.expressions(child, at, function)
        tests = [node] if isinstance(node, ast.expr) and getattr(at, "test", None) is node else []
        tests += [node.test] if isinstance(node, ast.IfExp) else []
        tests += node.ifs if isinstance(node, ast.comprehension) else []
        for test in tests:
            if not (isinstance(test, ast.Compare) and len(test.ops) == 1) and not isinstance(test, ast.UnaryOp):
                yield self.change(test, at, function, "condition negated", f"not ({ast.unparse(test)})")


def variants(node: ast.expr) -> Iterator[tuple[str, str]]:
    """Operator, and the text of what the expression becomes."""

    def changed(edit: Callable[[ast.expr], object]) -> str:
        other = copy.deepcopy(node)
        edit(other)
        return ast.unparse(other)

    if isinstance(node, ast.Compare):
        for i, operator in enumerate(node.ops):
            new = COMPARISONS[type(operator)]()
            yield "operator", changed(lambda other, i=i, new=new: other.ops.__setitem__(i, new))  # type: ignore[misc]
    elif isinstance(node, ast.BoolOp):
        other_op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "operator", changed(lambda other: setattr(other, "op", other_op))
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        operator_of = OPERATORS[type(node.op)]()
        yield "operator", changed(lambda other: setattr(other, "op", operator_of))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "negation dropped", ast.unparse(node.operand)
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield "constant", str(not node.value)
        elif isinstance(node.value, int):
            yield "constant + 1", str(node.value + 1)
            if node.value > 0:
                yield "constant - 1", str(node.value - 1)


def changes_of(file: str, text: str) -> Iterator[Change]:
    """All mutants of a module, in the order of the file."""
    seen: set[tuple[int, int, str]] = set()
    for change in Finder(file, text).find():
        key = (change.start, change.end, change.new)
        if key not in seen and change.new != change.old:
            seen.add(key)
            yield change
