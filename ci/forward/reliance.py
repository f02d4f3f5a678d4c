"""What a patch relies on in upstream's code, and whether another tree still has it so.

A patch that applies cleanly may still be wrong on a newer tree: a method that it overrides
got a parameter, a helper that it calls was renamed, a default changed.  So the lines that
a patch adds are read for what they use of upstream: imported names, members of upstream
classes (through annotations, ``self`` and chains like ``vllm_config.cache_config.x``),
overridden methods, enum members, calls with their arguments, and the functions and classes
that the added lines stand in.  Each use is then looked up in both trees.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ci.forward.equivalent import normal_form
from ci.forward.facts import (
    Call,
    Definition,
    Member,
    Tree,
    absolute,
    call_problems,
    describe,
    how_bound,
    is_abstract,
    own_members,
    signature_changes,
    unquoted,
)

BREAKS, CHANGED, LOOK = "breaks", "changed", "look"
_AROUND, _BODY = "the code around the hook changed", "its body changed"
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Use:
    """One thing of upstream that a patch uses.

    Attributes:
        kind: ``name``, ``member``, ``call``, ``override``, ``subclass`` or ``around``.
        module: Module of the definition at the pin.
        name: Its name there; ``Class.member`` for a member.
        where: ``path:line`` of the use.
        call: The arguments, for a call.
    """

    kind: str
    module: str
    name: str
    where: str
    call: Call | None = None

    @property
    def key(self) -> str:
        """``module:name``."""
        return f"{self.module}:{self.name}"


@dataclass(frozen=True)
class Finding:
    """A use that upstream changed under the patch's feet.

    Attributes:
        level: ``breaks`` (it will fail), ``changed`` (a promise is another) or ``look``
            (the code behind the name changed, what it promises did not).
        key: What changed.
        what: How, in words.
        where: Where the patch uses it.
    """

    level: str
    key: str
    what: str
    where: tuple[str, ...]


@dataclass(frozen=True)
class _Value:
    """What an expression is: a definition itself, or an instance of a class."""

    definition: Definition
    instance: bool = False


class Reader:
    """Reads one file of a patched tree for its uses of upstream.

    Args:
        upstream: The tree at the pin.
        stack: The tree with the series applied.
        path: The file.
        text: Its source in the patched tree.
        lines: Numbers of the lines that the patch added.
    """

    def __init__(
        self, upstream: Tree, stack: Tree, path: str, text: str, lines: frozenset[int]
    ) -> None:
        self.upstream, self.stack = upstream, stack
        self.path, self.lines = path, lines
        parts = path.removesuffix(".py").split("/")
        self.module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        self.syntax = ast.parse(text)
        self.uses: set[Use] = set()
        self.unresolved: set[str] = set()
        self.imports: dict[str, tuple[str, str]] = {}
        for node in ast.walk(self.syntax):
            if isinstance(node, ast.ImportFrom):
                source = absolute(node, self.module, path)
                for alias in node.names:
                    self.imports[alias.asname or alias.name] = (source, alias.name)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.asname:
                        self.imports[alias.asname] = (alias.name, "")
                    else:
                        first = alias.name.split(".")[0]
                        self.imports.setdefault(first, (first, ""))

    def read(self) -> "Reader":
        """Collect the uses; returns itself."""
        for node in ast.walk(self.syntax):
            if isinstance(node, ast.ImportFrom) and self._added(node):
                self._imported(node)
        self._block(self.syntax.body, {}, None)
        self._around(self.syntax.body, "")
        return self

    def _added(self, node: ast.AST) -> bool:
        first = getattr(node, "lineno", 0)
        last = getattr(node, "end_lineno", None) or first
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            return first in self.lines
        return any(line in self.lines for line in range(first, last + 1))

    def _imported(self, node: ast.ImportFrom) -> None:
        source = absolute(node, self.module, self.path)
        if source.split(".")[0] not in ("vllm", "tests"):
            return
        for alias in node.names:
            found = self.upstream.find(source, alias.name)
            if found is not None:
                self._use("name", found.module, found.name, node)
            elif self.stack.find(source, alias.name) is None:
                self.unresolved.add(f"{source}:{alias.name}")

    def _use(
        self, kind: str, module: str, name: str, node: ast.AST, call: Call | None = None
    ) -> None:
        self.uses.add(Use(kind, module, name, f"{self.path}:{getattr(node, 'lineno', 0)}", call))

    # Types of expressions.

    def _name(self, name: str, env: Mapping[str, _Value]) -> _Value | None:
        if name in env:
            return env[name]
        if name in self.imports:
            module, original = self.imports[name]
            found = self.upstream.find(module, original) or self.stack.find(module, original)
        else:
            found = self.stack.find(self.module, name)
        if found is not None:
            return _Value(found)
        if name.endswith("_config"):
            return self._config(name)
        return None

    def _config(self, name: str) -> _Value | None:
        """Take ``cache_config`` for a ``CacheConfig`` where nothing says otherwise."""
        camel = "".join(part.capitalize() for part in name.strip("_").split("_"))
        camel = camel.replace("Lora", "LoRA")
        found = self.upstream.find("vllm.config", camel)
        return _Value(found, True) if found is not None else None

    def _annotation(self, written: ast.expr | None, module: str = "") -> _Value | None:
        """Return an instance of the class that an annotation names."""
        node = unquoted(written) if written is not None else None
        if node is None:
            return None
        if isinstance(node, ast.BinOp):
            return self._annotation(node.left, module) or self._annotation(node.right, module)
        if isinstance(node, ast.Subscript):
            outer = ast.unparse(node.value).split(".")[-1]
            if outer in ("Optional", "Annotated", "ClassVar", "Final"):
                inner = node.slice.elts[0] if isinstance(node.slice, ast.Tuple) else node.slice
                return self._annotation(inner, module)
            if outer in ("type", "Type"):
                value = self._annotation(node.slice, module)
                return _Value(value.definition) if value else None
            return self._annotation(node.value, module)
        found: Definition | None = None
        if module and module != self.module:
            found = self.upstream.expression(node, module) or self.stack.expression(node, module)
        elif isinstance(node, (ast.Name, ast.Attribute)):
            value = self._type(node, {})
            found = value.definition if value and not value.instance else None
        if found is not None and isinstance(found.node, ast.ClassDef):
            return _Value(found, True)
        return None

    def _type(self, node: ast.expr, env: Mapping[str, _Value]) -> _Value | None:
        if isinstance(node, ast.Name):
            return self._name(node.id, env)
        if isinstance(node, ast.Attribute):
            owner = self._type(node.value, env)
            if owner is None:
                return self._config(node.attr) if node.attr.endswith("_config") else None
            return self._attribute(owner, node.attr)
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id == "super" and "super()" in env:
                return env["super()"]
            called = self._type(node.func, env)
            if called is None or called.instance:
                return None
            if isinstance(called.definition.node, ast.ClassDef):
                return _Value(called.definition, True)
            if isinstance(called.definition.node, _FUNCTIONS):
                return self._annotation(called.definition.node.returns, called.definition.module)
        if isinstance(node, ast.IfExp):
            return self._type(node.body, env) or self._type(node.orelse, env)
        if isinstance(node, ast.Await):
            return self._type(node.value, env)
        return None

    def _tree_of(self, definition: Definition) -> Tree:
        found = self.upstream.find(definition.module, definition.name.split(".")[0])
        return self.upstream if found is not None else self.stack

    def _member(self, owner: _Value, name: str) -> Member | None:
        """Return a member as upstream has it, or as the stack has it."""
        definition = owner.definition
        if not isinstance(definition.node, ast.ClassDef):
            return None
        ours = self.stack.members(definition).get(name)
        tree = self._tree_of(definition)
        theirs = tree.members(definition).get(name) if tree is self.upstream else None
        return theirs or ours

    def _attribute(self, owner: _Value, name: str) -> _Value | None:
        definition = owner.definition
        if not definition.name and not owner.instance:
            found = self.upstream.find(definition.module, name) or self.stack.find(
                definition.module, name
            )
            return _Value(found) if found is not None else None
        member = self._member(owner, name)
        if member is None:
            return self._config(name) if name.endswith("_config") else None
        node, module = member.node, member.owner.module
        if isinstance(node, ast.AnnAssign):
            return self._annotation(node.annotation, module)
        if isinstance(node, _FUNCTIONS):
            if how_bound(node) == "property":
                return self._annotation(node.returns, module)
            return _Value(Definition(module, f"{member.owner.name}.{name}", node, ""))
        if self._tree_of(definition).is_enum(definition):
            return _Value(definition, True)
        return self._config(name) if name.endswith("_config") else None

    # Walking code with an environment of what names are.

    def _block(
        self, body: Iterable[ast.stmt], env: dict[str, _Value], inside: ast.ClassDef | None
    ) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                self._class(node, env)
            elif isinstance(node, _FUNCTIONS):
                self._function(node, dict(env), inside)
            else:
                self._statement(node, env, inside)

    def _statement(
        self, node: ast.stmt, env: dict[str, _Value], inside: ast.ClassDef | None
    ) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self._expression(child, env)
            elif isinstance(child, ast.withitem):
                self._expression(child.context_expr, env)
            elif isinstance(child, (ast.ExceptHandler, ast.match_case)):
                self._block(child.body, env, inside)
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            value = self._type(node.value, env)
            if isinstance(node.targets[0], ast.Name):
                if value is not None and inside is None:
                    env[node.targets[0].id] = value
                elif inside is None:
                    env.pop(node.targets[0].id, None)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            value = self._annotation(node.annotation)
            if value is not None and inside is None:
                env[node.target.id] = value
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list):
                self._block(block, env, inside)

    def _expression(self, node: ast.expr, env: Mapping[str, _Value]) -> None:
        for item in ast.walk(node):
            if not self._added(item):
                continue
            if isinstance(item, ast.Attribute):
                self._attribute_use(item, env)
            elif isinstance(item, ast.Call):
                self._call_use(item, env)
            elif isinstance(item, ast.Name) and isinstance(item.ctx, ast.Load):
                found = self._name(item.id, env)
                if found is not None and item.id not in env and not found.instance:
                    self._definition_use("name", found.definition, item)

    def _definition_use(
        self, kind: str, definition: Definition, node: ast.AST, call: Call | None = None
    ) -> None:
        top = definition.name.split(".")[0]
        at_pin = self.upstream.find(definition.module, top) if top else None
        if at_pin is None:
            return  # the stack's own
        _, _, member = definition.name.partition(".")
        if not member or member in self.upstream.members(at_pin):
            self._use(kind, definition.module, definition.name, node, call)

    def _attribute_use(self, node: ast.Attribute, env: Mapping[str, _Value]) -> None:
        owner = self._type(node.value, env)
        if owner is None:
            return
        if not owner.definition.name:
            found = self.upstream.find(owner.definition.module, node.attr)
            if found is not None and found.name:
                self._use("name", found.module, found.name, node)
            return
        if isinstance(owner.definition.node, ast.ClassDef):
            member = self._upstream_member(owner.definition, node.attr)
            if member is not None:
                self._use("member", member.owner.module, f"{member.owner.name}.{node.attr}", node)

    def _upstream_member(self, definition: Definition, name: str) -> Member | None:
        """Return the member that an attribute means, if it is upstream's own."""
        member = self.stack.members(definition).get(name)
        if member is None:
            return None
        at_pin = self.upstream.find(member.owner.module, member.owner.name)
        if at_pin is None:
            return None
        return self.upstream.members(at_pin).get(name)

    def _call_use(self, node: ast.Call, env: Mapping[str, _Value]) -> None:
        called = self._type(node.func, env)
        if called is None or called.instance:
            return
        definition = called.definition
        if isinstance(definition.node, (ast.ClassDef, *_FUNCTIONS)):
            self._definition_use("call", definition, node, Call.of(node))

    def _class(self, node: ast.ClassDef, env: dict[str, _Value]) -> None:
        itself = Definition(self.module, node.name, node, self.path)
        for written in [*node.bases, *node.decorator_list]:
            self._expression(written, env)
        ancestors = [d for d in self.stack.lineage(itself) if d.key != itself.key]
        bases = [
            found for d in ancestors if (found := self.upstream.find(d.module, d.name)) is not None
        ]
        if bases and node.lineno in self.lines:
            self._use("subclass", bases[0].module, bases[0].name, node)
        for name, item in own_members(node).items():
            if not self._added(item) or isinstance(item, ast.AugAssign):
                continue
            if name in ("__init__", "__slots__") and not isinstance(item, _FUNCTIONS):
                continue
            for base in bases:
                member = self.upstream.members(base).get(name)
                if member is not None:
                    self._use("override", member.owner.module, f"{member.owner.name}.{name}", item)
                    break
        self._block(node.body, env, node)

    def _function(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef, env: dict[str, _Value],
        inside: ast.ClassDef | None,
    ) -> None:  # fmt: skip
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for decorator in node.decorator_list:
            self._expression(decorator, env)
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            if default is not None:
                self._expression(default, env)
        for argument in arguments:
            env.pop(argument.arg, None)
            value = self._annotation(argument.annotation)
            if value is not None:
                env[argument.arg] = value
            if argument.annotation is not None:
                self._expression(argument.annotation, {})
        if node.returns is not None:
            self._expression(node.returns, {})
        if inside is not None and arguments:
            itself = Definition(self.module, inside.name, inside, self.path)
            bound = how_bound(node)
            if bound != "staticmethod":
                env[arguments[0].arg] = _Value(itself, bound != "classmethod")
            ancestors = [d for d in self.stack.lineage(itself) if d.key != itself.key]
            if ancestors:
                env["super()"] = _Value(ancestors[0], True)
        self._block(node.body, env, None)

    def _around(self, body: list[ast.stmt], prefix: str) -> None:
        """Record the upstream functions and classes that added lines stand in."""
        for node in body:
            if not isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
                continue
            inside = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            if node.lineno in self.lines or not self.lines.intersection(inside):
                continue
            name = f"{prefix}{node.name}"
            top = self.upstream.find(self.module, name.split(".")[0])
            if top is None or top.module != self.module:
                continue
            if isinstance(node, ast.ClassDef):
                own = {
                    line
                    for item in node.body
                    if not isinstance(item, _FUNCTIONS) or item.lineno in self.lines
                    for line in range(item.lineno, (item.end_lineno or item.lineno) + 1)
                }
                if self.lines & own:
                    self._use("around", self.module, name, node)
                if not prefix:
                    self._around(node.body, f"{name}.")
            else:
                self._use("around", self.module, name, node)


def compare(uses: Iterable[Use], before: Tree, after: Tree, moved: Mapping[str, str]) -> (
    list[Finding]
):  # fmt: skip
    """Look every use up in both trees.

    Args:
        uses: What a patch uses.
        before: The tree at the pin.
        after: The target.
        moved: Files of the pin that the target has under another name.

    Returns:
        What changed, the gravest first, one finding a change with all its places.
    """
    gathered: dict[tuple[str, str, str], set[str]] = {}
    for use in sorted(uses, key=lambda u: (u.key, u.kind, u.where)):
        for level, what in _compare(use, before, after, moved):
            gathered.setdefault((level, use.key, what), set()).add(use.where)
    order = {BREAKS: 0, CHANGED: 1, LOOK: 2}
    hooks = {key for _, key, what in gathered if what == _AROUND}
    for group in [g for g in gathered if g[1] in hooks and g[2] == _BODY]:
        del gathered[group]
    worst: dict[str, int] = {}
    for level, key, _ in gathered:
        worst[key] = min(order[level], worst.get(key, 9))
    found = [
        Finding(level, key, what, tuple(sorted(where, key=_natural)))
        for (level, key, what), where in gathered.items()
        # That a body changed goes without saying where more is known.
        if level != LOOK or worst[key] == order[LOOK]
    ]
    return sorted(found, key=lambda f: (order[f.level], f.key, f.what))


def _natural(text: str) -> list[tuple[int, str]]:
    return [(int(p), "") if p.isdigit() else (0, p) for p in re.split(r"(\d+)", text)]


def _find(use: Use, tree: Tree) -> tuple[Definition | Member | None, Definition | None]:
    """Return what a use means in a tree, and the class it belongs to if it is a member."""
    top, _, attribute = use.name.partition(".")
    owner = tree.find(use.module, top)
    if owner is None or not attribute:
        return owner, None
    return tree.members(owner).get(attribute), owner


def _elsewhere(use: Use, after: Tree, moved: Mapping[str, str]) -> str:
    """Say where something that is gone from its module is now, if anywhere."""
    top = use.name.split(".")[0]
    stem = use.module.replace(".", "/")
    for path in (f"{stem}.py", f"{stem}/__init__.py"):
        if path in moved:
            return f"; its file is {moved[path]} there"
    modules = after.everywhere.get(top, [])
    if 0 < len(modules) <= 3:
        return f"; {', '.join(modules)} defines {top}"
    return ""


def _compare(
    use: Use, before: Tree, after: Tree, moved: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    old, _ = _find(use, before)
    new, owner = _find(use, after)
    if old is None:
        return
    if new is None:
        if owner is not None:
            yield BREAKS, f"is gone from {owner.name}{_similar(old, before, owner, after)}"
        else:
            yield BREAKS, f"is gone{_elsewhere(use, after, moved)}"
        return
    if (
        isinstance(new, Definition)
        and isinstance(old, Definition)
        and new.module != old.module
        and "." not in use.name
    ):
        yield CHANGED, f"is defined in {new.module} there (still importable here)"
    was, now = old.node, new.node
    if isinstance(was, _FUNCTIONS) and isinstance(now, _FUNCTIONS):
        yield from _function_changes(use, was, now, isinstance(new, Member))
    elif isinstance(was, ast.ClassDef) and isinstance(now, ast.ClassDef):
        assert isinstance(old, Definition) and isinstance(new, Definition)
        yield from _class_changes(use, old, new, before, after)
    elif type(was) is not type(now) and not isinstance(was, (ast.Assign, ast.AnnAssign)):
        yield BREAKS, f"was {_kind(was)} and is {_kind(now)} there"
    elif describe(was) != describe(now):
        yield CHANGED, f"`{_short(describe(was))}` is now `{_short(describe(now))}`"


def _kind(node: ast.AST) -> str:
    if isinstance(node, _FUNCTIONS):
        return "a function"
    return "a class" if isinstance(node, ast.ClassDef) else "a variable"


def _short(text: str, limit: int = 100) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _similar(old: Definition | Member, before: Tree, owner: Definition, after: Tree) -> str:
    """Name new members of a class that have the shape of one that is gone."""
    if not isinstance(old, Member):
        return ""
    known = before.members(old.owner)
    shape = _shape(old.node)
    fits = [
        name
        for name, member in after.members(owner).items()
        if name not in known and shape and _shape(member.node) == shape
    ]
    return f"; new there with the same body or value: {', '.join(fits[:3])}" if fits else ""


def _shape(node: ast.AST) -> str:
    if isinstance(node, _FUNCTIONS):
        return normal_form(node, with_name=False)
    value = getattr(node, "value", None)
    if value is None:
        return ""
    annotation = getattr(node, "annotation", None)
    return f"{ast.dump(value)}{ast.dump(annotation) if annotation is not None else ''}"


def _function_changes(
    use: Use,
    was: ast.FunctionDef | ast.AsyncFunctionDef,
    now: ast.FunctionDef | ast.AsyncFunctionDef,
    is_member: bool,
) -> Iterator[tuple[str, str]]:
    changes = signature_changes(was, now)
    if use.kind == "call" and use.call is not None:
        bound = is_member and how_bound(now) != "staticmethod"
        for problem in call_problems(use.call, now, bound):
            if problem not in call_problems(use.call, was, bound):
                yield BREAKS, f"the call {problem}"
    if use.kind == "override":
        if is_abstract(now) and not is_abstract(was):
            changes.append("is abstract now")
        grave = [c for c in changes if c.startswith(("new ", "parameter ")) or " is now " in c]
        grave = [
            c for c in grave if not c.startswith(("annotation", "return annotation", "default"))
        ]
        for change in changes:
            yield BREAKS if change in grave else CHANGED, f"overridden: {change}"
    else:
        for change in changes:
            yield CHANGED, change
    if not changes and normal_form(was) != normal_form(now):
        yield LOOK, _AROUND if use.kind == "around" else _BODY


def _class_changes(
    use: Use, old: Definition, new: Definition, before: Tree, after: Tree
) -> Iterator[tuple[str, str]]:
    was, now = old.node, new.node
    assert isinstance(was, ast.ClassDef) and isinstance(now, ast.ClassDef)
    if [ast.unparse(b) for b in was.bases] != [ast.unparse(b) for b in now.bases]:
        yield CHANGED, f"{describe(was)} is now {describe(now)}"
    olds, news = before.members(old), after.members(new)
    if use.kind == "subclass":
        for name, member in news.items():
            if is_abstract(member.node) and not (name in olds and is_abstract(olds[name].node)):
                yield BREAKS, f"subclasses must define {name}{describe(member.node)} there"
    fields_before, fields_after = _fields(was), _fields(now)
    if use.kind == "call" and use.call is not None:
        yield from _constructor_problems(use, olds, news, fields_before, fields_after)
    around, enum = use.kind == "around", before.is_enum(old)
    if not (around or enum or use.kind == "call"):
        return
    # A hook in a class cares for all of it; who only calls it, for what every call gets.
    added = [n for n in fields_after if n not in fields_before]
    if added and (around or enum):
        yield CHANGED if around else LOOK, f"new: {', '.join(added)}"
    kept = [n for n in fields_before if n in fields_after]
    if around or enum:
        for name in [n for n in fields_before if n not in fields_after]:
            yield CHANGED, f"{name} is gone"
        order = [n for n in fields_after if n in fields_before]
        if kept != order:
            yield CHANGED, f"order: {', '.join(order)}"
    for name in kept:
        one, other = describe(fields_before[name]), describe(fields_after[name])
        passed = use.call is not None and name in use.call.keywords
        if one != other and not passed:
            yield CHANGED, f"{name}: `{_short(one)}` is now `{_short(other)}`"


def _fields(node: ast.ClassDef) -> dict[str, ast.AST]:
    """Return a class's own attributes in order."""
    return {
        target.id: item
        for item in node.body
        if isinstance(item, (ast.Assign, ast.AnnAssign))
        for target in (item.targets if isinstance(item, ast.Assign) else [item.target])
        if isinstance(target, ast.Name)
    }


def _constructor_problems(
    use: Use,
    olds: Mapping[str, Member],
    news: Mapping[str, Member],
    before: Mapping[str, ast.AST],
    after: Mapping[str, ast.AST],
) -> Iterator[tuple[str, str]]:
    assert use.call is not None
    old_init, new_init = olds.get("__init__"), news.get("__init__")
    if new_init is not None and isinstance(new_init.node, _FUNCTIONS):
        known = (
            call_problems(use.call, old_init.node, True)
            if old_init is not None and isinstance(old_init.node, _FUNCTIONS)
            else []
        )
        for problem in call_problems(use.call, new_init.node, True):
            if problem not in known:
                yield BREAKS, f"the call {problem}"
        return
    for name in use.call.keywords:
        if name in before and name not in after:
            yield BREAKS, f"the call passes {name}=, which is no field any more"
    required = [
        name
        for name, node in after.items()
        if isinstance(node, ast.AnnAssign)
        and node.value is None
        and "ClassVar" not in ast.unparse(node.annotation)
    ]
    if not use.call.stars:
        for name in required[use.call.positional :]:
            if name not in use.call.keywords and name not in before:
                yield BREAKS, f"the call does not pass {name}, which is a required field"
