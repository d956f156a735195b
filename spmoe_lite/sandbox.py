"""A jinja2 template as a stranger's program: run in a sandbox, and on a budget.

jinja2's immutable sandbox keeps a template away from everything that is not its data, but bounds neither
time nor memory. Here every rendering has a budget:

    steps   one per node of a loop body per iteration, of a macro per call, plus the size of what an
            operator, filter, test, method or comparison looks at
    chars   everything a template creates: text, lists, slices, output
    value   the size of a single value, nested lists counted in full (so that printing or comparing
            one cannot explode)

It is enforced by rewriting the parsed template before it is compiled: loops, macro bodies, literals, `~`,
comparisons and slices pass through a counting filter; `+ * % **`, calls, filters, tests and output are
hooked. Sizes are computed before the work is done. Only methods on a short list can be called; imports,
includes, blocks and recursive loops are refused. It counts, so it does not depend on the clock, and a
large input raises it.

Names, settings and results are those of the reference library's chat templates (`raise_exception`,
`strftime_now`, its `tojson`, loop controls, the `generation` block).
"""

from __future__ import annotations

import datetime
import json
import re
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from functools import wraps
from typing import Any

import jinja2
import jinja2.ext
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils
from jinja2 import nodes

MAX_SOURCE_CHARS = 1 << 18  # the largest published templates have about 50,000
MAX_STEPS = 8_000_000  # some seconds; a history of 600 messages takes 0.4 million
MAX_CHARS = 1 << 25
MAX_VALUE = 1 << 22
MAX_NODES = 100_000
MAX_DEPTH = 200  # of the parsed template
MAX_NESTING = 64  # of values, and of macro calls
MAX_WIDTH = 1000  # of a number format, an indent, a padded text
MAX_INT_BITS = 4096


class Program:
    """A template, compiled once; safe to use from several threads."""

    def __init__(self, source: str) -> None:
        """ValueError says why `source` is no template, with the line if there is one."""
        if len(source) > MAX_SOURCE_CHARS:
            raise ValueError(f"{len(source)} characters, more than {MAX_SOURCE_CHARS}")
        self._lock = threading.Lock()
        self._sandbox = sandbox = _Sandbox()
        try:
            tree = sandbox.parse(source)
            _measure(tree)
            _Rewriter().visit(tree)
            self._template = jinja2.Template.from_code(
                sandbox, sandbox.compile(tree), sandbox.make_globals(None)
            )
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"line {error.lineno}: {error}") from None
        except (
            Exception
        ) as error:  # among them RecursionError, MemoryError and Python's SyntaxError
            raise ValueError(str(error) or type(error).__name__) from None

    def run(self, variables: dict[str, Any], size: int) -> str:
        """The text it writes; `size` characters of input raise the budget.

        Raises OverBudget, or whatever the template raised or tripped over.
        """
        with self._lock:
            budget = self._sandbox.budget = _Budget(size)
            try:
                pieces = []
                for piece in self._template.generate(variables):
                    budget.output(len(piece))
                    pieces.append(piece)
                return "".join(pieces)
            finally:
                self._sandbox.budget = _Budget(0)


class OverBudget(Exception):
    """The template wants more than its budget."""


# The budget


class _Budget:
    """What one rendering may still use. `size`: characters of the input, which raise the limits."""

    def __init__(self, size: int) -> None:
        self.steps = MAX_STEPS + 4 * size
        self.chars = MAX_CHARS + 16 * size
        self.value = MAX_VALUE + 4 * size
        self.printed = 0
        self.depth = 0
        # Sizes of nested containers, kept with the container so that an id is not used again.
        self._known: dict[int, tuple[tuple[int, int], Any]] = {}

    def step(self, count: int = 1) -> None:
        self.steps -= count
        if self.steps < 0:
            raise OverBudget("it runs for too many steps")

    def make(self, chars: int) -> None:
        """Account for something about to be created."""
        self.chars -= chars
        if chars > self.value or self.chars < 0:
            raise OverBudget("it makes too much text")
        self.step(1 + (chars >> 6))

    def output(self, chars: int) -> None:
        self.printed += chars
        if self.printed > self.value:
            raise OverBudget(f"it writes more than {self.value} characters")

    def weigh(self, value: Any) -> int:
        """Size of `value` with all it contains, counted once per reference."""
        return self._measure(value)[0]

    def _measure(self, value: Any) -> tuple[int, int]:
        """(size, levels of nesting) of `value`; what is too large or too deep is refused."""
        if isinstance(value, str):
            return len(value), 0
        if isinstance(value, int):
            return 8 + value.bit_length(), 0
        if isinstance(value, range):
            return 8 * len(value), 1
        if isinstance(value, jinja2.utils.Namespace):
            raise OverBudget("it prints or stores a namespace")
        if not isinstance(value, _CONTAINERS):
            return 8, 0
        known = self._known.get(id(value))
        if known is not None:
            return known[0]
        self.step(1 + len(value))
        total, levels = 8, 0
        for child in value:
            for part in (child, value[child]) if isinstance(value, dict) else (child,):
                size, below = self._measure(part)
                total += 8 + size
                levels = max(levels, below)
            if total > self.value:
                raise OverBudget("it builds too large a value")
        if levels > MAX_NESTING:
            raise OverBudget(f"it nests values more than {MAX_NESTING} deep")
        if levels or len(value) > 64:
            self.step(50)
            self._known[id(value)] = ((total, levels + 1), value)
        return total, levels + 1

    def touch(self, value: Any) -> Any:
        """Account for looking at all of `value`."""
        self.step(1 + (self.weigh(value) >> 6))
        return value

    def touch_all(self, args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
        for value in args:
            self.touch(value)
        for value in kwargs.values():
            self.touch(value)

    def made(self, value: Any) -> Any:
        """Account for a new value. Lazy results are computed now, so that they cannot be stacked."""
        if isinstance(value, Iterator):
            return iter(self.made(self.listed(value)))
        if isinstance(value, str):
            self.make(len(value))
        elif isinstance(value, (list, tuple, dict)):
            self.make(8 * len(value))
            self.touch(value)
        return value

    def listed(self, values: Iterable[Any]) -> list[Any]:
        """`list(values)`, refused before it is too long."""
        if isinstance(values, Sized):
            self.make(8 * len(values))
            return list(values)
        result = []
        for value in values:
            result.append(value)
            if 8 * len(result) > self.value:
                raise OverBudget("it builds too large a value")
        return result

    def number(self, value: Any) -> None:
        """Refuse a width, an indent or a precision that is too large."""
        if isinstance(value, int) and abs(value) > MAX_WIDTH:
            raise OverBudget(f"it pads to {value} characters")


_CONTAINERS: tuple[type[Any], ...] = (
    list,
    tuple,
    dict,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
)


# The sandbox

_BINARY = {"+", "-", "*", "/", "//", "%", "**"}

_STR_METHODS = frozenset(
    "capitalize casefold count endswith expandtabs find index isalnum isalpha isascii isdecimal isdigit "
    "isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip partition "
    "removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines "
    "startswith strip swapcase title upper zfill center".split()
)
_LIST_METHODS = frozenset("count index copy".split())
_DICT_METHODS = frozenset("get items keys values copy".split())

# Filters of jinja2 that are offered; the others either multiply their input or serve web pages.
_FILTERS = frozenset(
    "abs attr capitalize center count d default dictsort e escape first float format indent int items join "
    "last length list lower map max min reject rejectattr replace reverse round safe select selectattr "
    "sort string sum title trim truncate unique upper wordcount".split()
)
_SHALLOW = frozenset(
    "abs attr count d default first last length".split()
)  # look at no more than one item
_ITERATING = frozenset(
    "dictsort join map max min reject rejectattr select selectattr sort unique wordcount".split()
)
_READING_TESTS = frozenset(
    "lower upper in == eq equalto != ne > gt greaterthan ge >= < lt lessthan <= le".split()
)


class _Namespace(jinja2.utils.Namespace):
    """`namespace()` without names that start with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, args = args[0], args[1:]
        values = dict(*args, **kwargs)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot store {name!r}")


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} marks answers for training; here it is its content."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Formatter(jinja2.sandbox.SandboxedFormatter):
    """`str.format` whose widths and results are counted."""

    def __init__(self, sandbox: _Sandbox) -> None:
        self._budget = sandbox.budget
        super().__init__(sandbox)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        self._budget.make(self._budget.weigh(value))
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> Any:
        for digits in re.findall(r"\d+", format_spec):
            self._budget.number(int(digits[:9]))
        self._budget.make(self._budget.weigh(value))
        return super().format_field(value, format_spec)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """jinja2's immutable sandbox with the reference library's settings and a budget."""

    intercepted_binops = frozenset(_BINARY)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
            finalize=self._print,
        )
        self.budget = _Budget(0)
        functions: dict[str, Any] = {
            "range": jinja2.sandbox.safe_range,
            "dict": lambda *args, **kwargs: dict(*args, **kwargs),
            "namespace": _Namespace,
            "cycler": jinja2.utils.Cycler,
            "joiner": jinja2.utils.Joiner,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        self.globals.clear()
        self.globals.update(functions)
        self._functions = {id(function) for function in functions.values()}
        self.filters = {name: self._limited(name, self.filters[name]) for name in _FILTERS}
        self.filters["tojson"] = self._to_json
        self.filters["sum"] = self._sum
        self.filters |= self._counters()
        for name in _READING_TESTS:
            self.tests[name] = self._limited_test(self.tests[name])

    # Output, operators, calls

    def _print(self, value: Any) -> Any:
        self.budget.step(4)
        if not isinstance(value, jinja2.Undefined):
            self.budget.make(self.budget.weigh(value))
        return value

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = self.budget
        if operator == "%" and isinstance(left, str):
            self._check_percent(left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * abs(right) > MAX_INT_BITS:
                raise OverBudget(f"it raises a number to the power of {right}")
        elif operator == "*" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() + right.bit_length() > MAX_INT_BITS:
                raise OverBudget("it multiplies very large numbers")
        elif operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(many, (str, list, tuple)) and isinstance(times, int):
                    budget.make(max(times, 0) * budget.weigh(many))
        elif operator == "+" and isinstance(left, (str, list, tuple)):
            budget.make(budget.weigh(left) + budget.weigh(right))
        budget.step()
        return budget.made(super().call_binop(context, operator, left, right))

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.budget.touch(argument)
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` and `format_map` as a counted function."""
        owner = getattr(value, "__self__", None)
        if not isinstance(owner, str) or not isinstance(value, types.BuiltinMethodType):
            return super().wrap_str_format(value)
        if value.__name__ not in ("format", "format_map"):
            return None

        def run(*args: Any, **kwargs: Any) -> str:
            if value.__name__ == "format_map":
                args, kwargs = (), dict(*args)
            text: str = _Formatter(self).vformat(str(owner), args, kwargs)
            return text

        run.is_counted = True  # type: ignore[attr-defined]
        return run

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        budget = self.budget
        budget.touch_all(args, kwargs) if not self._takes_namespaces(obj) else budget.step()
        if isinstance(obj, types.BuiltinMethodType):
            args = self._check_method(obj, args, kwargs)
        elif not self._is_offered(obj):
            raise jinja2.exceptions.SecurityError(f"a {type(obj).__name__} cannot be called here")
        budget.step(16)
        budget.depth += 1
        if budget.depth > MAX_NESTING:
            raise OverBudget(f"its macros call each other more than {MAX_NESTING} deep")
        try:
            return budget.made(super().call(context, obj, *args, **kwargs))
        finally:
            budget.depth -= 1

    def _takes_namespaces(self, obj: Any) -> bool:
        return isinstance(obj, jinja2.runtime.Macro) or obj is _Namespace

    def _is_offered(self, obj: Any) -> bool:
        if id(obj) in self._functions or getattr(obj, "is_counted", False):
            return True
        if isinstance(obj, types.MethodType):
            return isinstance(obj.__self__, (jinja2.runtime.LoopContext, jinja2.utils.Cycler))
        return isinstance(obj, (jinja2.runtime.Macro, jinja2.utils.Joiner, jinja2.Undefined))

    def _check_method(self, method: Any, args: Any, kwargs: Any) -> Any:
        """Refuse methods that are not on the list; count what the others are about to make."""
        owner, name, budget = method.__self__, method.__name__, self.budget
        for kind, names in ((str, _STR_METHODS), (dict, _DICT_METHODS)):
            if isinstance(owner, kind) and name in names:
                break
        else:
            if not isinstance(owner, (list, tuple)) or name not in _LIST_METHODS:
                raise jinja2.exceptions.SecurityError(
                    f"{type(owner).__name__}.{name} is not offered here"
                )
        if name in _DICT_METHODS and isinstance(owner, dict):
            budget.step()
            return args
        budget.touch(owner)
        if name == "join" and args:
            args = (budget.listed(args[0]), *args[1:])
            budget.make(budget.weigh(args[0]) + len(args[0]) * len(owner))
        elif name == "replace" and len(args) >= 2:
            self._check_replace(owner, args[0], args[1])
        elif name in ("center", "ljust", "rjust", "zfill", "expandtabs"):
            for value in (*args, *kwargs.values()):
                budget.number(value)
            budget.make((len(owner) + 1) * 8 if name != "expandtabs" else len(owner) * MAX_WIDTH)
        elif name in ("split", "rsplit", "splitlines"):
            budget.make(8 * len(owner))
        return args

    def _check_replace(self, text: Any, old: Any, new: Any) -> None:
        if isinstance(text, str) and isinstance(old, str) and isinstance(new, str):
            self.budget.make(len(text) + (text.count(old) if old else len(text) + 1) * len(new))

    def _check_percent(self, text: str, values: Any) -> None:
        if "*" in text:
            raise OverBudget("it takes the width of a number format from a value")
        for digits in re.findall(r"\d+", text):
            self.budget.number(int(digits[:9]))
        self.budget.make(len(text) + text.count("%") * (self.budget.weigh(values) + MAX_WIDTH))

    # Filters and tests

    def _limited(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that accounts for its arguments and its result."""
        skip = 1 if hasattr(function, "jinja_pass_arg") else 0
        check = getattr(self, f"_check_filter_{name}", None)

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            budget = self.budget
            if name in _SHALLOW:
                budget.step()
                return function(*args, **kwargs)
            args = (*args[:skip], *map(self._settled, args[skip:]))
            budget.touch_all(args[skip:], kwargs)
            if name in _ITERATING and args[skip:] and hasattr(args[skip], "__len__"):
                words = [
                    word for word in (*args[skip + 1 :], *kwargs.values()) if isinstance(word, str)
                ]
                budget.step(len(args[skip]) * (8 + sum(map(len, words))))
            if check is not None:
                check(*args[skip:], **kwargs)
            result = function(*args, **kwargs)
            return result if name in ("min", "max", "safe") else budget.made(result)

        return run

    def _settled(self, value: Any) -> Any:
        return self.budget.listed(value) if isinstance(value, Iterator) else value

    def _check_filter_center(self, value: Any, width: Any = 80) -> None:
        self.budget.number(width)

    def _check_filter_indent(
        self, s: Any, width: Any = 4, first: Any = False, blank: Any = False
    ) -> None:
        self.budget.number(width)
        indent = len(width) if isinstance(width, str) else int(width)
        self.budget.make((str(s).count("\n") + 2) * indent + self.budget.weigh(s))

    def _check_filter_round(self, value: Any, precision: Any = 0, method: Any = "common") -> None:
        if not isinstance(precision, int) or abs(precision) > 100:
            raise OverBudget(f"it rounds to {precision} digits")

    def _check_filter_replace(self, s: Any, old: Any, new: Any, count: Any = None) -> None:
        self._check_replace(str(s), str(old), str(new))

    def _check_filter_join(self, value: Any, d: Any = "", attribute: Any = None) -> None:
        if hasattr(value, "__len__"):
            self.budget.make(self.budget.weigh(value) + len(value) * len(str(d)))

    def _check_filter_format(self, value: Any, *args: Any, **kwargs: Any) -> None:
        self._check_percent(str(value), kwargs or args)

    def _check_filter_int(self, value: Any, default: Any = 0, base: Any = 10) -> None:
        if isinstance(value, str) and len(value) > MAX_WIDTH:
            raise OverBudget(f"it reads a number of {len(value)} digits")

    def _sum(self, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
        """Numbers only: adding lists one by one takes quadratic time."""
        values = self.budget.listed(iterable)
        if attribute is not None:
            values = [self.getitem(value, attribute) for value in values]
        if not all(isinstance(value, (int, float)) for value in (*values, start)):
            raise TypeError("the filter sum adds numbers only")
        self.budget.touch(values)
        return sum(values, start)

    def _to_json(
        self,
        x: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        """The reference library's `tojson`: no HTML escapes. Written piece by piece so that it can stop."""
        self.budget.touch(x)
        self.budget.number(indent)
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        pieces = []
        for piece in encoder.iterencode(x):
            self.budget.make(len(piece))
            pieces.append(piece)
        self.budget.make(sum(map(len, pieces)))
        return "".join(pieces)

    def _limited_test(self, function: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.budget.touch_all(args, {})
            return function(*args)

        return run

    # What the rewritten template calls. Each takes the context so that jinja2 never evaluates one
    # at compile time; the colon keeps the names out of a template's reach.

    def _counters(self) -> dict[str, Callable[..., Any]]:
        @jinja2.pass_context
        def loop(context: Any, values: Any, steps: int, chars: int) -> list[Any]:
            result = self.budget.listed(values)
            self.budget.step(len(result) * steps)
            self.budget.chars -= len(result) * chars
            self.budget.make(0)
            return result

        @jinja2.pass_context
        def body(context: Any, steps: int, chars: int) -> str:
            self.budget.step(steps)
            self.budget.make(chars)
            return ""

        @jinja2.pass_context
        def literal(context: Any, value: Any) -> Any:
            return self.budget.made(value)

        @jinja2.pass_context
        def compared(context: Any, value: Any) -> Any:
            return (
                self.budget.touch(value) if not isinstance(value, jinja2.utils.Namespace) else value
            )

        @jinja2.pass_context
        def sliced(context: Any, value: Any) -> Any:
            self.budget.make(self.budget.weigh(value))
            return value

        @jinja2.pass_context
        def concat(context: Any, *values: Any) -> str:
            self.budget.make(sum(map(self.budget.weigh, values)))
            return "".join(map(str, values))

        return {
            "limit:loop": loop,
            "limit:body": body,
            "limit:literal": literal,
            "limit:compared": compared,
            "limit:sliced": sliced,
            "limit:concat": concat,
        }


def _raise_exception(message: Any) -> None:
    raise jinja2.exceptions.TemplateError(str(message))


def _strftime_now(format: str) -> str:
    if len(format) > 256:
        raise OverBudget("it formats a date with more than 256 characters")
    return datetime.datetime.now().strftime(format)


# The rewriting

_REFUSED = (nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport, nodes.Block)


def _measure(tree: nodes.Template) -> None:
    """Refuse what no chat template needs, without recursion."""
    count = 0
    waiting: list[tuple[nodes.Node, int]] = [(tree, 0)]
    while waiting:
        node, depth = waiting.pop()
        count += 1
        if depth > MAX_DEPTH or count > MAX_NODES:
            raise ValueError("too deeply nested" if depth > MAX_DEPTH else "too long")
        if isinstance(node, _REFUSED) or (isinstance(node, nodes.For) and node.recursive):
            raise ValueError(
                f"line {node.lineno}: {type(node).__name__.lower()} is not offered to chat templates"
            )
        waiting.extend((child, depth + 1) for child in node.iter_child_nodes())


def _cost(children: Iterable[nodes.Node]) -> tuple[int, int]:
    """(nodes, characters of fixed text) of a body."""
    count = chars = 0
    waiting = list(children)
    while waiting:
        node = waiting.pop()
        count += 1
        if isinstance(node, nodes.TemplateData):
            chars += len(node.data)
        waiting.extend(node.iter_child_nodes())
    return count, chars


def _filtered(name: str, node: nodes.Node, args: list[nodes.Expr] | None = None) -> nodes.Filter:
    return nodes.Filter(node, f"limit:{name}", args or [], [], None, None, lineno=node.lineno)


class _Rewriter(jinja2.visitor.NodeTransformer):
    """Puts the counting filters where the sandbox has no hook."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        test = [node.test] if node.test is not None else []
        steps, chars = _cost([*node.body, *test])
        self.generic_visit(node)
        node.iter = _filtered("loop", node.iter, [nodes.Const(steps), nodes.Const(chars)])
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:
        return self._counted(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.CallBlock:
        return self._counted(node)

    def _counted(self, node: Any) -> Any:
        steps, chars = _cost([*node.body, *node.defaults])
        self.generic_visit(node)
        charge = _filtered("body", nodes.Const(steps, lineno=node.lineno), [nodes.Const(chars)])
        node.body.insert(0, nodes.ExprStmt(charge, lineno=node.lineno))
        return node

    def _literal(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") != "load" else _filtered("literal", node)

    visit_List = _literal
    visit_Tuple = _literal
    visit_Dict = _literal

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered("concat", node.nodes[0], list(node.nodes[1:]))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        holders: list[Any] = [node, *node.ops]
        for holder in holders:
            if not isinstance(holder.expr, nodes.Const):
                holder.expr = _filtered("compared", holder.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Getitem:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _filtered("sliced", node.node)
        return node
