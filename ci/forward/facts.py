"""What a source tree defines, read with ``ast`` and never imported.

A :class:`Tree` answers by name: what ``vllm.config.VllmConfig`` is (following imports from
module to module), which members a class has with those of its bases, how a function may be
called.  Two trees can so be compared without an environment in which either runs.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
_ENUM_BASES = frozenset({"Enum", "IntEnum", "StrEnum", "Flag", "IntFlag"})


@dataclass(frozen=True)
class Definition:
    """A function, class, variable or module of a tree.

    Attributes:
        module: Dotted name of the module that defines it.
        name: Qualified name in the module; empty for the module itself.
        node: Its syntax, an ``ast.Module`` for a module.
        path: The file, relative to the tree.
    """

    module: str
    name: str
    node: ast.AST
    path: str

    @property
    def key(self) -> str:
        """``module:name``, the same in every tree that has it in the same place."""
        return f"{self.module}:{self.name}" if self.name else self.module


@dataclass(frozen=True)
class Member:
    """A method or attribute of a class, and the class in which it is written."""

    name: str
    owner: Definition
    node: ast.AST

    @property
    def key(self) -> str:
        """``module:Class.name``."""
        return f"{self.owner.key}.{self.name}"

    @property
    def text(self) -> str:
        """What is written: a signature for a method, annotation and value otherwise."""
        return describe(self.node)


def unquoted(node: ast.expr) -> ast.expr | None:
    """Return what a quoted annotation says, None where that is no expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        try:
            return ast.parse(node.value, mode="eval").body
        except SyntaxError:
            return None
    return node


class Tree:
    """The Python modules of a source tree.

    Args:
        root: The tree's root.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._modules: dict[str, ast.Module | None] = {}
        self._tables: dict[str, dict[str, ast.AST]] = {}
        self._members: dict[Definition, dict[str, Member]] = {}

    def path_of(self, module: str) -> str | None:
        """Return the file of a module, relative to the tree, or None."""
        stem = module.replace(".", "/")
        for path in (f"{stem}.py", f"{stem}/__init__.py"):
            if (self.root / path).is_file():
                return path
        return None

    def module(self, name: str) -> ast.Module | None:
        """Return a module's syntax, or None where the tree has no such module."""
        if name not in self._modules:
            path = self.path_of(name)
            parsed = None
            if path is not None:
                try:
                    parsed = ast.parse((self.root / path).read_text(encoding="utf-8"))
                except (SyntaxError, UnicodeDecodeError):
                    parsed = None
            self._modules[name] = parsed
        return self._modules[name]

    def names(self, module: str) -> dict[str, ast.AST]:
        """Return what a module binds at its top level, import statements included."""
        if module not in self._tables:
            parsed = self.module(module)
            self._tables[module] = dict(_bindings(parsed.body)) if parsed else {}
        return self._tables[module]

    def find(
        self, module: str, name: str = "", _seen: frozenset[str] = frozenset()
    ) -> Definition | None:
        """Return what a name means in a module, wherever it is really defined.

        Args:
            module: Dotted module name.
            name: A top-level name, or empty for the module.

        Returns:
            The definition, or None: the tree does not have it, or it comes from outside.
        """
        if not name:
            parsed = self.module(module)
            path = self.path_of(module)
            return Definition(module, "", parsed, path) if parsed and path else None
        if f"{module}:{name}" in _seen:
            return None
        seen = _seen | {f"{module}:{name}"}
        node = self.names(module).get(name)
        if node is None:
            for source in self._stars(module):
                if found := self.find(source, name, seen):
                    return found
            return self._lazy(module, name, seen) or self.find(f"{module}.{name}")
        if isinstance(node, ast.ImportFrom):
            source = absolute(node, module, self.path_of(module) or "")
            original = next(a.name for a in node.names if (a.asname or a.name) == name)
            return self.find(source, original, seen)
        if isinstance(node, ast.Import):
            alias = next(a for a in node.names if (a.asname or a.name.split(".")[0]) == name)
            return self.find(alias.name if alias.asname else alias.name.split(".")[0])
        return Definition(module, name, node, self.path_of(module) or "")

    def _stars(self, module: str) -> Iterator[str]:
        parsed = self.module(module)
        for node in parsed.body if parsed else ():
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                yield absolute(node, module, self.path_of(module) or "")

    def _lazy(self, module: str, name: str, seen: frozenset[str]) -> Definition | None:
        """Follow the table that a package's ``__getattr__`` looks names up in."""
        names = self.names(module)
        if "__getattr__" not in names:
            return None
        for node in names.values():
            value = getattr(node, "value", None)
            if not isinstance(value, ast.Dict):
                continue
            for key, target in zip(value.keys, value.values, strict=True):
                if not (isinstance(key, ast.Constant) and key.value == name):
                    continue
                if isinstance(target, ast.Constant) and isinstance(target.value, str):
                    source, _, attribute = target.value.partition(":")
                    source = f"{module}{source}" if source.startswith(".") else source
                    return self.find(source, attribute or name, seen)
        return None

    def bases(self, definition: Definition) -> list[Definition]:
        """Return a class's bases that this tree defines."""
        found = []
        if isinstance(definition.node, ast.ClassDef):
            for base in definition.node.bases:
                base = base.value if isinstance(base, ast.Subscript) else base
                resolved = self.expression(base, definition.module)
                if resolved is not None and isinstance(resolved.node, ast.ClassDef):
                    found.append(resolved)
        return found

    def lineage(self, definition: Definition) -> list[Definition]:
        """Return a class and its ancestors, nearest first."""
        order: list[Definition] = []
        queue = [definition]
        while queue:
            current = queue.pop(0)
            if current.key not in {d.key for d in order}:
                order.append(current)
                queue += self.bases(current)
        return order

    def expression(self, written: ast.expr, module: str) -> Definition | None:
        """Resolve ``name`` or ``package.name`` as written in a module."""
        node = unquoted(written)
        if isinstance(node, ast.Name):
            return self.find(module, node.id)
        if isinstance(node, ast.Attribute):
            owner = self.expression(node.value, module)
            if owner is not None and not owner.name:
                return self.find(owner.module, node.attr)
        return None

    def members(self, definition: Definition) -> dict[str, Member]:
        """Return a class's members with those that it inherits in this tree; to be read only."""
        if definition not in self._members:
            found: dict[str, Member] = {}
            for owner in self.lineage(definition):
                for name, node in own_members(owner.node).items():
                    found.setdefault(name, Member(name, owner, node))
            self._members[definition] = found
        return self._members[definition]

    def is_enum(self, definition: Definition) -> bool:
        """Whether a class is an enumeration."""
        return any(
            ast.unparse(base).split(".")[-1] in _ENUM_BASES
            for owner in self.lineage(definition)
            if isinstance(owner.node, ast.ClassDef)
            for base in owner.node.bases
        )

    @cached_property
    def everywhere(self) -> dict[str, list[str]]:
        """Return for every top-level name of the package the modules that define it."""
        found: dict[str, list[str]] = {}
        for path in sorted((self.root / "vllm").rglob("*.py")):
            parts = path.relative_to(self.root).with_suffix("").parts
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            for name, node in self.names(module).items():
                if not isinstance(node, (ast.Import, ast.ImportFrom)):
                    found.setdefault(name, []).append(module)
        return found


def _bindings(body: list[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """Yield the names that statements bind, those in ``if`` and ``try`` included."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, node
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                for leaf in ast.walk(target):
                    if isinstance(leaf, ast.Name):
                        yield leaf.id, node
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign)):
            if isinstance(node.target, ast.Name):
                yield node.target.id, node
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name.split(".")[0], node
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.name != "*":
                    yield alias.asname or alias.name, node
        elif isinstance(node, ast.If):
            # What runs in the end wins over what only a type checker sees.
            yield from _bindings(node.body)
            yield from _bindings(node.orelse)
        elif isinstance(node, ast.Try):
            for handler in node.handlers:
                yield from _bindings(handler.body)
            yield from _bindings([*node.body, *node.orelse, *node.finalbody])
        elif isinstance(node, ast.With):
            yield from _bindings(node.body)


def absolute(node: ast.ImportFrom, module: str, path: str) -> str:
    """Return the absolute module that a ``from ... import`` names."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    keep = len(parts) - node.level + (1 if path.endswith("__init__.py") else 0)
    return ".".join([*parts[:keep], *([node.module] if node.module else [])])


def own_members(node: ast.AST) -> dict[str, ast.AST]:
    """Return what a class itself defines: methods, class attributes, ``self.x = ...``."""
    if not isinstance(node, ast.ClassDef):
        return {}
    found = {
        name: item
        for name, item in _bindings(node.body)
        if not isinstance(item, (ast.Import, ast.ImportFrom))
    }
    for method in node.body:
        if not isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        arguments = [*method.args.posonlyargs, *method.args.args]
        if not arguments:
            continue
        for item in ast.walk(method):
            targets: list[ast.expr] = []
            if isinstance(item, ast.Assign):
                targets = item.targets
            elif isinstance(item, (ast.AnnAssign, ast.AugAssign)):
                targets = [item.target]
            for target in targets:
                for leaf in ast.walk(target):
                    if (
                        isinstance(leaf, ast.Attribute)
                        and isinstance(leaf.value, ast.Name)
                        and leaf.value.id == arguments[0].arg
                        and isinstance(leaf.ctx, ast.Store)
                    ):
                        found.setdefault(leaf.attr, item)
    return found


@dataclass(frozen=True)
class Parameter:
    """One parameter of a function; ``default`` is source text, None when there is none."""

    name: str
    kind: str
    default: str | None
    annotation: str


def parameters(node: Function) -> tuple[Parameter, ...]:
    """Return a function's parameters in order."""

    def text(item: ast.expr | None) -> str:
        return ast.unparse(item) if item is not None else ""

    args = node.args
    plain = [*args.posonlyargs, *args.args]
    missing: list[ast.expr | None] = [None] * (len(plain) - len(args.defaults))
    found = [
        Parameter(
            arg.arg,
            "positional-only" if i < len(args.posonlyargs) else "positional",
            ast.unparse(default) if default is not None else None,
            text(arg.annotation),
        )
        for i, (arg, default) in enumerate(zip(plain, [*missing, *args.defaults], strict=True))
    ]
    if args.vararg:
        found.append(Parameter(args.vararg.arg, "*", None, text(args.vararg.annotation)))
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        value = ast.unparse(default) if default is not None else None
        found.append(Parameter(arg.arg, "keyword-only", value, text(arg.annotation)))
    if args.kwarg:
        found.append(Parameter(args.kwarg.arg, "**", None, text(args.kwarg.annotation)))
    return tuple(found)


def how_bound(node: Function) -> str:
    """Return ``staticmethod``, ``classmethod``, ``property`` or an empty string."""
    for decorator in node.decorator_list:
        name = ast.unparse(decorator).split(".")[-1]
        if name in ("staticmethod", "classmethod", "property", "cached_property"):
            return "property" if name == "cached_property" else name
    return ""


def is_abstract(node: ast.AST) -> bool:
    """Whether a method must be defined by subclasses."""
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and any(
        ast.unparse(d).split(".")[-1] in ("abstractmethod", "abstractproperty")
        for d in node.decorator_list
    )


def describe(node: ast.AST) -> str:
    """Return what a definition promises, in one line of source text."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        bound = how_bound(node)
        return f"{bound + ' ' if bound else ''}({ast.unparse(node.args)}){returns}"
    if isinstance(node, ast.ClassDef):
        return f"class({', '.join(ast.unparse(base) for base in node.bases)})"
    if isinstance(node, ast.AnnAssign):
        value = f" = {ast.unparse(node.value)}" if node.value else ""
        return f"{ast.unparse(node.annotation)}{value}"
    if isinstance(node, ast.Assign):
        return ast.unparse(node.value)
    return ""


def signature_changes(old: Function, new: Function) -> list[str]:
    """Say how a function's signature changed, one phrase a change.

    A parameter that another of the same kind, place, default and annotation replaces is
    called renamed.
    """
    before, after = parameters(old), parameters(new)
    olds, news = {p.name: p for p in before}, {p.name: p for p in after}
    changes = []
    renamed: set[str] = set()
    for index, parameter in enumerate(before):
        if parameter.name in news or index >= len(after):
            continue
        other = after[index]
        if other.name not in olds and (other.kind, other.default, other.annotation) == (
            parameter.kind,
            parameter.default,
            parameter.annotation,
        ):
            changes.append(f"parameter {parameter.name} is now called {other.name}")
            renamed |= {parameter.name, other.name}
    changes += [
        f"parameter {p.name} is gone"
        for p in before
        if p.name not in news and p.name not in renamed
    ]
    for p in after:
        if p.name not in olds and p.name not in renamed:
            required = p.default is None and p.kind not in ("*", "**")
            default = "" if p.default is None else f" = {p.default}"
            changes.append(f"new {'required ' if required else ''}parameter {p.name}{default}")
    for p in before:
        q = news.get(p.name)
        if q is None:
            continue
        if p.kind != q.kind:
            changes.append(f"parameter {p.name}: {p.kind} is now {q.kind}")
        if p.default != q.default:
            changes.append(
                f"default of {p.name}: {'none' if p.default is None else p.default} is now "
                f"{'none' if q.default is None else q.default}"
            )
        if p.annotation != q.annotation:
            changes.append(
                f"annotation of {p.name}: {p.annotation or 'none'} is now {q.annotation or 'none'}"
            )
    kept_before = [p.name for p in before if p.name in news and p.kind != "keyword-only"]
    kept_after = [p.name for p in after if p.name in olds and p.kind != "keyword-only"]
    if sorted(kept_before) == sorted(kept_after) and kept_before != kept_after:
        changes.append(f"order of parameters: {', '.join(kept_after)}")
    before_returns = ast.unparse(old.returns) if old.returns else "none"
    after_returns = ast.unparse(new.returns) if new.returns else "none"
    if before_returns != after_returns:
        changes.append(f"return annotation: {before_returns} is now {after_returns}")
    if how_bound(old) != how_bound(new):
        changes.append(
            f"{how_bound(old) or 'plain function'} is now {how_bound(new) or 'plain function'}"
        )
    return changes


@dataclass(frozen=True)
class Call:
    """How a call passes its arguments; a star makes a number or set open-ended."""

    positional: int
    keywords: tuple[str, ...]
    stars: bool

    @staticmethod
    def of(node: ast.Call) -> "Call":
        """Read a call."""
        return Call(
            positional=sum(not isinstance(a, ast.Starred) for a in node.args),
            keywords=tuple(sorted(k.arg for k in node.keywords if k.arg)),
            stars=any(isinstance(a, ast.Starred) for a in node.args)
            or any(k.arg is None for k in node.keywords),
        )


def call_problems(call: Call, node: Function, skip_first: bool) -> list[str]:
    """Say why a call would not bind to a function; empty when it would.

    Args:
        call: The call.
        node: The function.
        skip_first: Leave out the first parameter: it is bound already (``self``, ``cls``).
    """
    params = list(parameters(node))
    if skip_first and params and params[0].kind in ("positional", "positional-only"):
        params = params[1:]
    takes_any = any(p.kind == "**" for p in params)
    plain = [p for p in params if p.kind in ("positional", "positional-only")]
    problems = []
    if call.positional > len(plain) and not any(p.kind == "*" for p in params):
        problems.append(f"passes {call.positional} positional arguments, {len(plain)} are taken")
    by_name = {p.name for p in params if p.kind in ("positional", "keyword-only")}
    problems += [
        f"passes {name}=, which is not taken"
        for name in call.keywords
        if name not in by_name and not takes_any
    ]
    if not call.stars:
        given = {p.name for p in plain[: call.positional]} | set(call.keywords)
        problems += [
            f"does not pass {p.name}, which is required"
            for p in params
            if p.default is None and p.kind not in ("*", "**") and p.name not in given
        ]
    return problems
