"""Is a change already in another tree, in whatever words?

Code is compared by normal form: without comments, docstrings and annotations, local names
numbered, comparisons and negations written one way, an ``else`` after a ``return`` and a
variable that only carries a returned value dropped.  What differs beyond that (another
algorithm for the same result) is not found; only the patch's own tests can tell then.
"""

import ast
import copy
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from ci.forward.facts import Function

_Branch = TypeVar("_Branch", ast.expr, list[ast.stmt])
# A function smaller than this (in syntax nodes) says too little to be recognized without
# its name: many methods are `return False`.
_TELLING = 24
_FLIP: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Gt: ast.Lt, ast.GtE: ast.LtE, ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Eq: ast.Eq,
    ast.NotEq: ast.NotEq,
}  # fmt: skip
_NEGATED: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip


@dataclass(frozen=True)
class Unit:
    """A function, a method, or what a module or class states outside of them."""

    path: str
    name: str
    node: ast.AST

    @property
    def label(self) -> str:
        """``path:name``."""
        return f"{self.path}:{self.name}"


@dataclass(frozen=True)
class Evidence:
    """How much of a change another tree already has.

    Attributes:
        found: Units of the change that are there, and where.
        partly: Units that hold some of the changed statements: how many of how many.
        absent: Units of which nothing is there.
    """

    found: tuple[tuple[str, str], ...]
    partly: tuple[tuple[str, int, int], ...]
    absent: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether all of the change is there."""
        return bool(self.found) and not self.partly and not self.absent


class _Normal(ast.NodeTransformer):
    """Rewrites syntax into its normal form."""

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.copy_location(ast.Constant(node.value), node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(arg=node.arg)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        self.generic_visit(node)
        if node.value is None:
            return node  # a field of a class: its annotation is what it says
        return ast.Assign(targets=[node.target], value=node.value, lineno=node.lineno)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.op, ast.Not):
            inner = node.operand
            if isinstance(inner, ast.Compare) and len(inner.ops) == 1:
                negated = _NEGATED.get(type(inner.ops[0]))
                if negated:
                    return _ordered(ast.Compare(inner.left, [negated()], inner.comparators))
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        return _ordered(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        node.keywords.sort(key=lambda k: k.arg or "~")
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        node.test, node.body, node.orelse = _positive(node.test, node.body, node.orelse)
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        self.generic_visit(node)
        if node.orelse:
            node.test, node.body, node.orelse = _positive(node.test, node.body, node.orelse)
        return node

    def _function(self, node: Function) -> ast.AST:
        self.generic_visit(node)
        node.returns = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._function(node)

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list):
                setattr(node, field, _block(block))
        return node


def _positive(test: ast.expr, body: _Branch, orelse: _Branch) -> tuple[ast.expr, _Branch, _Branch]:
    """Turn a negated condition round."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return test.operand, orelse, body
    negative = (ast.IsNot, ast.NotEq, ast.NotIn)
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], negative):
        op = _NEGATED[type(test.ops[0])]()
        return ast.Compare(test.left, [op], test.comparators), orelse, body
    return test, body, orelse


def _ordered(node: ast.Compare) -> ast.Compare:
    if len(node.ops) == 1 and type(node.ops[0]) in _FLIP:
        left, right = node.left, node.comparators[0]
        if ast.dump(left) > ast.dump(right):
            return ast.Compare(right, [_FLIP[type(node.ops[0])]()], [left])
    return node


def _block(block: list[ast.stmt]) -> list[ast.stmt]:
    """Drop docstrings and ``pass``, an ``else`` after a jump, a carried return value."""
    result: list[ast.stmt] = []
    for node in block:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.Pass):
            continue
        jumps = (ast.Return, ast.Raise, ast.Continue, ast.Break)
        if isinstance(node, ast.If) and node.orelse and isinstance(node.body[-1], jumps):
            rest, node.orelse = node.orelse, []
            result += [node, *rest]
            continue
        before = result[-1] if result else None
        if (
            isinstance(node, ast.Return)
            and isinstance(node.value, ast.Name)
            and isinstance(before, ast.Assign)
            and len(before.targets) == 1
            and isinstance(before.targets[0], ast.Name)
            and before.targets[0].id == node.value.id
        ):
            result[-1] = ast.Return(before.value)
            continue
        result.append(node)
    # `if c: return a` followed by `return b` is what `return a if c else b` says.
    while len(result) >= 2:
        first, second = result[-2], result[-1]
        if (
            isinstance(first, ast.If)
            and not first.orelse
            and len(first.body) == 1
            and isinstance(first.body[0], ast.Return)
            and isinstance(second, ast.Return)
            and first.body[0].value is not None
            and second.value is not None
        ):
            test, one, other = _positive(first.test, first.body[0].value, second.value)
            result[-2:] = [ast.Return(ast.IfExp(test, one, other))]
            continue
        break
    return result


def _locals(node: ast.AST) -> list[str]:
    """Return the names that a function binds itself, in order of first use."""
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return []
    args = node.args
    params = {
        a.arg
        for a in [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
        if a is not None
    }
    kept = {
        name
        for item in ast.walk(node)
        if isinstance(item, (ast.Global, ast.Nonlocal))
        for name in item.names
    }
    stored = {
        item.id
        for item in ast.walk(node)
        if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store)
    }
    own = stored - params - kept
    order: list[str] = []
    for item in _walk_in_order(node):
        if isinstance(item, ast.Name) and item.id in own and item.id not in order:
            order.append(item.id)
    return order


def _walk_in_order(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _walk_in_order(child)


class _Rename(ast.NodeTransformer):
    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name(self.names.get(node.id, node.id), node.ctx)


def _normalized(node: ast.AST, numbered: bool) -> ast.AST:
    fresh = _Normal().visit(copy.deepcopy(node))
    names = {name: f"_{index}" if numbered else "_" for index, name in enumerate(_locals(fresh))}
    renamed: ast.AST = _Rename(names).visit(fresh)
    return renamed


def normal_form(node: ast.AST, with_name: bool = True) -> str:
    """Return the normal form of a unit as text, equal for code that says the same.

    Args:
        node: A function, or any other syntax.
        with_name: Keep a function's own name in it.
    """
    fresh = _normalized(node, numbered=True)
    if not with_name and isinstance(fresh, (ast.FunctionDef, ast.AsyncFunctionDef)):
        fresh.name = "_"
    return ast.dump(fresh)


def statements(node: ast.AST) -> Counter[str]:
    """Count a unit's statements in normal form, local names left open.

    A compound statement counts by its head, so that a statement is the same inside of
    another ``if``.
    """
    found: Counter[str] = Counter()
    for item in ast.walk(_normalized(node, numbered=False)):
        if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found[f"def({ast.dump(item.args)})"] += 1
        elif isinstance(item, ast.stmt):
            head = copy.copy(item)
            for field in ("body", "orelse", "finalbody", "handlers"):
                if isinstance(getattr(head, field, None), list):
                    setattr(head, field, [])
            found[ast.dump(head)] += 1
    return found


def units(path: str, text: str) -> dict[str, Unit]:
    """Split a module into its units by qualified name.

    Args:
        path: The file's path, for labels.
        text: Its source; one that cannot be parsed has no units.
    """
    try:
        parsed = ast.parse(text)
    except (SyntaxError, ValueError):
        return {}
    found: dict[str, Unit] = {}

    def enter(body: list[ast.stmt], prefix: str) -> None:
        rest: list[ast.stmt] = []
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found[prefix + node.name] = Unit(path, prefix + node.name, node)
            elif isinstance(node, ast.ClassDef):
                enter(node.body, f"{prefix}{node.name}.")
            elif not isinstance(node, (ast.Import, ast.ImportFrom)):
                rest.append(node)
        if rest:
            name = f"{prefix}(body)"
            found[name] = Unit(path, name, ast.Module(body=rest, type_ignores=[]))

    enter(parsed.body, "")
    return found


def _size(node: ast.AST) -> int:
    return sum(1 for _ in ast.walk(_normalized(node, numbered=False)))


@dataclass(frozen=True)
class Change:
    """One file before and after a patch; empty text where it does not exist."""

    path: str
    before: str
    after: str


class Catalogue:
    """A tree's functions by normal form, to recognize one under another name or path.

    Args:
        files: Path and source of every module to know.
    """

    def __init__(self, files: Mapping[str, str]) -> None:
        self.files = files
        self._by_words: dict[frozenset[str], list[Unit]] | None = None
        self._units: dict[str, dict[str, Unit]] = {}
        self._nameless: dict[Unit, str] = {}

    def units(self, path: str) -> dict[str, Unit]:
        """Return the units of one of the tree's files."""
        if path not in self._units:
            self._units[path] = units(path, self.files.get(path, ""))
        return self._units[path]

    def nameless(self, unit: Unit) -> str:
        """Return the normal form of one of the tree's units, its own name left out."""
        if unit not in self._nameless:
            self._nameless[unit] = normal_form(unit.node, with_name=False)
        return self._nameless[unit]

    def same_content(self, node: ast.AST) -> list[Unit]:
        """Return the tree's functions that say what this one says, whatever their name."""
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or _size(node) < _TELLING:
            return []
        if self._by_words is None:
            self._by_words = {}
            for path in self.files:
                for unit in self.units(path).values():
                    if isinstance(unit.node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                        self._by_words.setdefault(_words(unit.node), []).append(unit)
        form = normal_form(node, with_name=False)
        return [
            unit for unit in self._by_words.get(_words(node), []) if self.nameless(unit) == form
        ]


def _words(node: ast.AST) -> frozenset[str]:
    """Return the attributes and keywords in a function, which no rewriting changes.

    They are cheap to collect and sort out almost every function before normal forms are
    compared.
    """
    body = node.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else []
    return frozenset(
        item.attr if isinstance(item, ast.Attribute) else str(item.arg)
        for statement in body
        if not isinstance(statement, ast.AnnAssign)
        for item in ast.walk(statement)
        if isinstance(item, (ast.Attribute, ast.keyword))
    )


def evidence(
    changes: list[Change],
    target: Catalogue,
    pin: Catalogue,
    moved: Mapping[str, str] | None = None,
) -> Evidence:
    """Look for a patch's changes in another tree.

    Args:
        changes: The patch's Python files outside of tests.
        target: The tree to look in.
        pin: The tree that the patch was made for: what both have proves nothing.
        moved: Where the target has files of the pin, if not in the same place.

    Returns:
        The evidence, unit by unit.
    """
    found: list[tuple[str, str]] = []
    partly: list[tuple[str, int, int]] = []
    absent: list[str] = []
    for change in changes:
        old, new = units(change.path, change.before), units(change.path, change.after)
        there = target.units((moved or {}).get(change.path, change.path))
        for name in sorted({*old, *new}):
            was, now = old.get(name), new.get(name)
            if was and now and normal_form(was.node) == normal_form(now.node):
                continue
            unit = now or was
            assert unit is not None
            other = there.get(name)
            if now is None:
                if other is None:
                    found.append((unit.label, "removed there too"))
                else:
                    absent.append(unit.label)
                continue
            if other is not None and normal_form(other.node) == normal_form(now.node):
                where = "word for word" if ast.dump(other.node) == ast.dump(now.node) else (
                    "in other words"
                )  # fmt: skip
                at = other.label if other.path != change.path else "the same place"
                found.append((unit.label, f"{at}, {where}"))
                continue
            same = [
                u for u in target.same_content(now.node)
                if target.nameless(u) not in {pin.nameless(p) for p in pin.units(u.path).values()}
            ]  # fmt: skip
            if same:
                found.append((unit.label, f"{same[0].label}, by content"))
                continue
            have, whole = _share(was, now, other)
            if whole and have == whole:
                found.append((unit.label, f"all {whole} changed statements, among others"))
            elif have:
                partly.append((unit.label, have, whole))
            else:
                absent.append(unit.label)
    return Evidence(tuple(found), tuple(partly), tuple(absent))


def _share(was: Unit | None, now: Unit, other: Unit | None) -> tuple[int, int]:
    """Count the changed statements that another version of a unit has changed alike."""
    if other is None:
        return 0, 0
    before = statements(was.node) if was else Counter()
    after, there = statements(now.node), statements(other.node)
    added, removed = after - before, before - after
    have = sum((added & (there - before)).values())
    have += sum(count for text, count in removed.items() if there[text] <= after[text])
    return have, sum(added.values()) + sum(removed.values())
