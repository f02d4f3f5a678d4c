"""Full tables of decisions: which attention backends a platform prefers, in every case.

The function that makes the list is taken out of the platform's module and executed on its
own, once for every way its conditions can turn out.  What the module can answer by itself
(its architecture predicates) is answered; every other question (is AITER there, an
environment variable) is asked both ways and becomes a condition of the row.
"""

import ast
import builtins
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

FUNCTION = re.compile(r"_?get_(?:attn_|attention_)?backend_priorit(?:y|ies)")
_MOST_PATHS = 4096
_SAFE = (
    "any", "all", "bool", "dict", "enumerate", "float", "frozenset", "getattr", "int", "isinstance",
    "len", "list", "max", "min", "range", "reversed", "set", "sorted", "str", "sum", "tuple", "zip",
    "ImportError", "ValueError", "Exception", "AttributeError", "RuntimeError",
)  # fmt: skip


class NotEvaluated(Exception):
    """The function is not there or cannot be evaluated; says why."""


@dataclass(frozen=True)
class Row:
    """One case.

    Attributes:
        conditions: The questions that were asked and their answers, in order.
        lists: For every tree the resulting names, or a text in angle brackets that says
            why there is none.
    """

    conditions: tuple[tuple[str, bool], ...]
    lists: tuple[tuple[str, ...], ...]


class _Decisions:
    """Answers questions along one path and remembers which were asked."""

    def __init__(self, given: Sequence[tuple[str, bool]]) -> None:
        self.answers = dict(given)
        self.asked: list[tuple[str, bool]] = []

    def ask(self, question: str) -> bool:
        answer = self.answers.get(question, False)
        if question not in dict(self.asked):
            self.asked.append((question, answer))
        return answer


class _Unknown:
    """A value of which only the name is known; its truth is a question."""

    def __init__(self, label: str, decisions: _Decisions) -> None:
        self._label, self._decisions = label, decisions

    def __getattr__(self, name: str) -> "_Unknown":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Unknown(f"{self._label}.{name}", self._decisions)

    def __call__(self, *args: Any, **kwargs: Any) -> "_Unknown":
        given = [_text(a) for a in args] + [f"{k}={_text(v)}" for k, v in kwargs.items()]
        return _Unknown(f"{self._label}({', '.join(given)})", self._decisions)

    def __getitem__(self, key: Any) -> "_Unknown":
        return _Unknown(f"{self._label}[{_text(key)}]", self._decisions)

    def __bool__(self) -> bool:
        return self._decisions.ask(self._label)

    def _compare(self, sign: str, other: Any) -> "_Unknown":
        return _Unknown(f"{self._label} {sign} {_text(other)}", self._decisions)

    def __eq__(self, other: object) -> Any:
        return self._compare("==", other)

    def __ne__(self, other: object) -> Any:
        return not self._compare("==", other)

    def __lt__(self, other: Any) -> Any:
        return self._compare("<", other)

    def __le__(self, other: Any) -> Any:
        return self._compare("<=", other)

    def __gt__(self, other: Any) -> Any:
        return self._compare(">", other)

    def __ge__(self, other: Any) -> Any:
        return self._compare(">=", other)

    def __contains__(self, item: Any) -> bool:
        return self._decisions.ask(f"{_text(item)} in {self._label}")

    def __iter__(self) -> Iterator[Any]:
        raise NotEvaluated(f"it iterates over {self._label}")

    def __hash__(self) -> int:
        return hash(self._label)

    def __repr__(self) -> str:
        return self._label


def _text(value: Any) -> str:
    return value._label if isinstance(value, (_Unknown, _Backend)) else repr(value)


class _Backend:
    """A member of the enumeration of backends."""

    def __init__(self, name: str) -> None:
        self.name = self._label = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Backend) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)


class _Backends:
    def __getattr__(self, name: str) -> _Backend:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Backend(name)


class _Scope(dict[str, Any]):
    """Globals in which every name that is not there is unknown."""

    decisions: _Decisions

    def __missing__(self, name: str) -> Any:
        if name in _SAFE:
            return getattr(builtins, name)
        return _Unknown(name, self.decisions)


def find_function(text: str) -> str:
    """Return the name of the function that makes the list.

    Raises:
        NotEvaluated: The module has none, or several.
    """
    names = [
        node.name
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and FUNCTION.fullmatch(node.name)
    ]
    if len(names) != 1:
        raise NotEvaluated(f"{len(names)} functions make a list of backend priorities")
    return names[0]


class Priorities:
    """The priority function of one platform module.

    Args:
        text: The module's source.
        arch: What the module's ``_GCN_ARCH`` shall be, empty where it has none.

    Raises:
        NotEvaluated: There is no such function.
    """

    def __init__(self, text: str, arch: str = "") -> None:
        self.name = find_function(text)
        self.arch = arch
        parsed = ast.parse(text)
        body = [node for node in map(self._kept, parsed.body) if node is not None]
        function = next(n for n in body if isinstance(n, ast.FunctionDef) and n.name == self.name)
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        self.arguments = [a.arg for a in arguments]
        module = ast.Module(body=body, type_ignores=[])
        self.code = compile(ast.fix_missing_locations(_Globals().visit(module)), "<table>", "exec")

    def _kept(self, node: ast.stmt) -> ast.stmt | None:
        """Keep functions and plain assignments, without decorators and annotations."""
        if isinstance(node, ast.FunctionDef):
            return _Bare().visit(node)  # type: ignore[no-any-return]
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            return ast.Assign(
                targets=node.targets,
                value=ast.Call(
                    func=ast.Name("__try__", ast.Load()),
                    args=[
                        ast.Constant(node.targets[0].id),
                        ast.Lambda(
                            args=ast.arguments([], [], None, [], [], None, []), body=node.value
                        ),
                    ],
                    keywords=[],
                ),
            )
        return None

    def __call__(self, decisions: _Decisions) -> tuple[str, ...]:
        """Evaluate along one path."""
        scope = _Scope()
        scope.decisions = decisions

        def attempt(name: str, value: Callable[[], Any]) -> Any:
            if name == "_GCN_ARCH" and self.arch:
                return self.arch
            quiet = _Decisions(())
            scope.decisions = quiet
            try:
                result = value()
            except Exception:
                result = None
            finally:
                scope.decisions = decisions
            known = not quiet.asked and isinstance(result, (bool, int, str, list, tuple, dict, set))
            return result if known else _Unknown(name, decisions)

        scope["__try__"] = attempt
        scope["__get__"] = lambda name: scope[name]
        scope["AttentionBackendEnum"] = _Backends()
        exec(self.code, scope)
        arguments = {name: _Unknown(name, decisions) for name in self.arguments}
        try:
            result = scope[self.name](**arguments)
            return tuple(
                item.name if isinstance(item, _Backend) else _text(item) for item in result
            )
        except NotEvaluated as error:
            return (f"<not evaluated: {error}>",)
        except Exception as error:
            return (f"<not evaluated: {type(error).__name__}: {error}>",)


class _Bare(ast.NodeTransformer):
    """Drops what a function needs of its module before it runs."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        node.decorator_list, node.returns = [], None
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg(arg=node.arg)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        self.generic_visit(node)
        if node.value is None:
            return ast.Pass()
        return ast.Assign(targets=[node.target], value=node.value)


class _Globals(ast.NodeTransformer):
    """Lets names that a function does not bind itself be looked up in the scope.

    CPython looks globals of a function up past ``__missing__``; and an import binds a name
    that is unknown here anyway.
    """

    def __init__(self) -> None:
        self.bound: list[set[str]] = []

    def visit_Import(self, node: ast.Import) -> ast.stmt:
        return ast.Pass()

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt:
        return ast.Pass()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        args = node.args
        names = {
            a.arg
            for a in [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
            if a is not None
        }
        names |= {
            item.id
            for item in ast.walk(node)
            if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store)
        }
        names |= {item.name for item in ast.walk(node) if isinstance(item, ast.FunctionDef)}
        self.bound.append(names)
        self.generic_visit(node)
        self.bound.pop()
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.Lambda:
        names = {a.arg for a in node.args.args}
        names |= {
            item.id
            for item in ast.walk(node)
            if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store)
        }
        self.bound.append(names)
        self.generic_visit(node)
        self.bound.pop()
        return node

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if (
            not self.bound
            or isinstance(node.ctx, ast.Store)
            or node.id.startswith("__")
            or any(node.id in names for names in self.bound)
        ):
            return node
        return ast.Call(ast.Name("__get__", ast.Load()), [ast.Constant(node.id)], [])


def table(functions: Sequence[Priorities | None]) -> list[Row]:
    """Evaluate several trees' functions together in every case that any of them knows.

    Args:
        functions: One for each tree; None where it has none.

    Returns:
        A row a case, without gaps or overlaps.

    Raises:
        NotEvaluated: There are too many cases.
    """
    rows: list[Row] = []
    pending: list[tuple[tuple[str, bool], ...]] = [()]
    while pending:
        given = pending.pop()
        decisions = _Decisions(given)
        lists = tuple(
            function(decisions) if function is not None else ("<no such function>",)
            for function in functions
        )
        rows.append(Row(tuple(decisions.asked), lists))
        if len(rows) > _MOST_PATHS:
            raise NotEvaluated(f"more than {_MOST_PATHS} cases")
        for index in range(len(given), len(decisions.asked)):
            question, answer = decisions.asked[index]
            pending.append((*decisions.asked[:index], (question, not answer)))
    return rows


def by_arch(
    texts: Sequence[str | None], arches: Sequence[str]
) -> list[tuple[list[str], list[Row]]]:
    """Return the tables of all architectures, those with the same table together.

    Args:
        texts: The platform module's source in each tree; None where it is not there.
        arches: The architectures.

    Raises:
        NotEvaluated: There are too many cases.
    """
    groups: list[tuple[list[str], list[Row]]] = []
    for arch in arches:
        functions = []
        for text in texts:
            try:
                functions.append(Priorities(text, arch) if text is not None else None)
            except (NotEvaluated, SyntaxError):
                functions.append(None)
        rows = table(functions)
        for names, known in groups:
            if known == rows:
                names.append(arch)
                break
        else:
            groups.append(([arch], rows))
    return groups
