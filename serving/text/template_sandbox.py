"""The environment in which chat templates are compiled and rendered: Jinja's sandbox, with a bound on everything.

Used by serving/text/templates.py. A template may come with a model from anywhere, so compiled code counts each step on a
meter: each body of a loop, a macro or a condition, each text put out, each operator, filter, test and call. Nothing is
computed while compiling. What jinja2 would allow and serving/text/template_bounds.py does not list is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import BuiltinMethodType, MethodType
from typing import Any, cast

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import _GroupTuple
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace, concat

from trireme.serving.text.template_bounds import (
    BoundedFormatter,
    binary,
    call_method,
    filters,
    functions,
    joined,
    methods_of,
    tests,
)
from trireme.serving.text.template_meter import Meter, TemplateLimit

SOURCE_LIMIT = 1 << 17  # characters of a template
MAX_LOOPS = 16  # inside each other; Python itself ends at 20
MAX_DEPTH = 150  # of expressions and statements inside each other

_DICT_NAMES = frozenset(dir(dict))
_RUNTIME = (Macro, LoopContext, BlockReference, Cycler, Joiner, Namespace, Undefined)


class _Generation(Extension):
    """`{% generation %}` marks what the model wrote, for training; it renders as its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Generator(CodeGenerator):
    """Writes the same code as jinja2's, with calls to the environment where something is made, written or compared."""

    environment: Sandbox

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        self.environment.tick()
        return super().visit(node, *args, **kwargs)

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        self.writeline("environment.tick()")
        super().blockvisit(nodes, frame)

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return node.data

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return f"environment.write({concat(group)!r})"

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write("environment.text(")

    def _output_child_post(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write(")")

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        if isinstance(node.value, float):
            self.write(f"float({str(node.value)!r})")  # which may be infinite
        else:
            super().visit_Const(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        """Compiles a comparison with `settled` around its operands."""
        self.write("(environment.settled(")
        self.visit(node.expr, frame)
        self.write(")")
        for operand in node.ops:
            self.visit(operand, frame)
        self.write(")")

    def visit_Operand(self, node: nodes.Operand, frame: Frame) -> None:
        self.write(f" {_COMPARISONS[node.op]} environment.settled(")
        self.visit(node.expr, frame)
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        """Compiles a slice as a call of `cut`."""
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.cut(")
        self.visit(node.node, frame)
        for bound in (node.arg.start, node.arg.stop, node.arg.step):
            self.write(", ")
            if bound is None:
                self.write("None")
            else:
                self.visit(bound, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        """Compiles a dict display with `settled` around its keys."""
        self.write("{")
        for item in node.items:
            self.write("environment.settled(")
            self.visit(item.key, frame)
            self.write("): ")
            self.visit(item.value, frame)
            self.write(", ")
        self.write("}")

    def visit_ScopedEvalContextModifier(self, node: nodes.ScopedEvalContextModifier, frame: Frame) -> None:
        self.fail("autoescape is not available in chat templates", node.lineno)


_COMPARISONS = {
    "eq": "==",
    "ne": "!=",
    "gt": ">",
    "gteq": ">=",
    "lt": "<",
    "lteq": "<=",
    "in": "in",
    "notin": "not in",
}


class _Format:
    """str.format or str.format_map of one text, as the sandbox allows it."""

    def __init__(self, environment: Sandbox, form: str, *, takes_map: bool) -> None:
        self._environment = environment
        self._form = form
        self._takes_map = takes_map

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        if self._takes_map:
            (kwargs,), args = args, ()
        meter = self._environment.meter
        meter.check(len(self._form), SOURCE_LIMIT)
        return BoundedFormatter(self._environment, meter).vformat(self._form, args, kwargs)


class Sandbox(ImmutableSandboxedEnvironment):
    """Compiles and renders with a meter, in one thread. `meter.start` begins each of the two."""

    code_generator_class = _Generator
    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # folding constants would compute while compiling
            extensions=[loopcontrols, _Generation],
            cache_size=0,
        )
        self.meter = Meter()
        self.tick = self.meter.tick
        self.write = self.meter.write
        self.settled = self.meter.settled
        self.filters = cast(Any, filters(self.meter))
        self.tests = cast(Any, tests(self.meter))
        self.globals = cast(Any, functions(self.meter))
        self._functions = frozenset(map(id, self.globals.values()))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > SOURCE_LIMIT:
            raise TemplateLimit(f"has {len(source)} characters; the limit is {SOURCE_LIMIT}")
        tree = super()._parse(source, name, filename)
        self._check_tree(tree)
        return tree

    def _check_tree(self, tree: nodes.Node) -> None:
        """Refuses nesting for which compiling takes quadratic time, and bounds the arguments that `*` makes of a value."""
        stack: list[tuple[nodes.Node, int, int]] = [(tree, 0, 0)]
        while stack:
            node, depth, loops = stack.pop()
            self.tick()
            loops += isinstance(node, nodes.For)
            if isinstance(node, nodes.Call | nodes.Filter | nodes.Test) and node.dyn_args is not None:
                node.dyn_args = nodes.Filter(node.dyn_args, "list", [], [], None, None, lineno=node.lineno)
            if depth > MAX_DEPTH or loops > MAX_LOOPS:
                raise TemplateLimit(f"is nested deeper than {MAX_DEPTH} levels or {MAX_LOOPS} loops")
            stack.extend((child, depth + 1, loops) for child in node.iter_child_nodes())

    # ------------------------------------------------------------ called by compiled templates

    def text(self, value: Any) -> str:
        """What is put out for a value."""
        return self.write(value if type(value) is str else str(self.settled(value)))

    def joined(self, parts: Iterable[Any]) -> str:
        return joined(self.meter, parts)

    def cut(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        """`value[start:stop:step]`."""
        return self.meter.made(value[start:stop:step])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is str and type(right) is str:  # most of what templates do
            self.tick()
            return self.meter.made(left + right)
        return binary(self.meter, operator, left, right)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.tick()
        if type(obj) is dict and type(argument) is str and argument in obj:
            return obj[argument]
        return super().getitem(obj, argument if type(argument) is str else self.meter.settled(argument))

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.tick()
        if type(obj) is dict and attribute in obj and attribute not in _DICT_NAMES:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Allows the listed methods of known types, and attributes of jinja's own runtime objects."""
        if isinstance(obj, _GroupTuple):
            return attr in ("grouper", "list")
        methods = methods_of(obj)
        if methods is not None:
            return attr in methods
        return isinstance(obj, _RUNTIME) and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Any:
        name = getattr(value, "__name__", "") if isinstance(value, BuiltinMethodType | MethodType) else ""
        if name not in ("format", "format_map") or not isinstance(value.__self__, str):
            return None
        return _Format(self, str(value.__self__), takes_map=name == "format_map")

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls what a template may call: macros and loops, methods of plain values, and our own functions."""
        self.meter.tick()
        if isinstance(obj, Macro | LoopContext | BlockReference | Undefined):
            return super().call(context, obj, *args, **kwargs)
        hidden = {name: kwargs.pop(name) for name in ("_loop_vars", "_block_vars") if name in kwargs}
        settled = [self.meter.settled(value) for value in args]
        named = {name: self.meter.settled(value) for name, value in kwargs.items()}
        if isinstance(obj, BuiltinMethodType | MethodType):
            if methods_of(obj.__self__) is not None:
                return call_method(self.meter, obj, settled, named)
            if isinstance(obj.__self__, _RUNTIME):
                return super().call(context, obj, *settled, **named, **hidden)
        if id(obj) in self._functions or isinstance(obj, _Format | Joiner):
            return self.meter.made(super().call(context, obj, *settled, **named, **hidden))
        raise SecurityError(f"{str(type(obj).__name__)!r} cannot be called by a chat template")
