"""Calls between a test and a program in another process; values are sent as data.

The two processes share nothing but a socket. Over it the test calls what the program defines;
values of exactly the built-in types (and of a few of the standard library's) are sent as data, and
anything else as a `Remote`. Only the test's process decides on the verdict. So nothing that the
program does to its own process can change it: not its frames, not patched builtins, not an object
that equals everything. `swarm.scorers.sandbox` starts both ends, without this package, so this
module imports the standard library only.
"""

import builtins
import datetime
import importlib
import json
import operator
import os
import socket
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Sequence
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from typing import Any, NoReturn

LONGEST = 2**27
"""Maximum number of characters of a message."""

LISTS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
MAPPINGS = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter, "defaultdict": dict}
BYTES: dict[str, Any] = {"bytes": bytes, "bytearray": bytearray}
DATES: dict[str, Any] = {
    "date": datetime.date,
    "datetime": datetime.datetime,
    "time": datetime.time,
}
PLAIN = (int, float, complex, bool, str, bytes, bytearray, range, object, *LISTS.values(), dict)
"""Types that are sent as themselves."""

MUTABLE = (list, dict, set, bytearray, deque, OrderedDict, Counter, defaultdict)
BASES = (int, float, str, bytes, tuple, list, dict, set, frozenset)

COMPARED = ("lt", "le", "gt", "ge")
BINARY = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "lshift",
    "rshift",
    "and_",
    "or_",
    "xor",
)
UNARY = {
    "len": len,
    "iter": iter,
    "next": next,
    "bool": bool,
    "str": str,
    "repr": repr,
    "int": int,
    "float": float,
    "complex": complex,
    "abs": abs,
    "neg": operator.neg,
    "pos": operator.pos,
    "invert": operator.invert,
    "index": operator.index,
    "reversed": reversed,
    "round": round,
}
ITEMS = ("getitem", "setitem", "delitem", "contains")

ALIASES = {"np": "numpy", "pd": "pandas"}
"""Modules that a test may name without an import, besides the standard library's."""


class Gone(BaseException):
    """The other process has ended, or violates the protocol."""


class Remote:
    """Proxy of an object of the other process.

    For a subclass of a built-in type the content has been sent too, and comparisons and operators
    use it. Otherwise it equals only objects of the same process, and no operator accepts it
    together with a value of this one: the program would learn the test's expectation, and answer
    accordingly.
    """

    __slots__ = ("_link", "_number", "_plain")

    def __init__(self, link: "Link", number: int, plain: Any) -> None:
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_plain", plain)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._link.ask("call", self, *args, named=named)

    def __getattr__(self, name: str) -> Any:
        return self._link.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._link.ask("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._link.ask("delattr", self, name)

    def __instancecheck__(self, thing: Any) -> bool:
        return isinstance(thing, Remote) and self._link.ask("isinstance", thing, self) is True

    def __subclasscheck__(self, thing: Any) -> bool:
        return isinstance(thing, Remote) and self._link.ask("issubclass", thing, self) is True

    def __enter__(self) -> Any:
        return self._link.ask("call", self._link.ask("getattr", self, "__enter__"))

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
        error_info = (None, None, None) if error is None else (type(error), error, None)
        return self._link.ask("call", self._link.ask("getattr", self, "__exit__"), *error_info)

    def __hash__(self) -> int:
        return hash(self._number if self._plain is MISSING else self._plain)

    def __format__(self, spec: Any) -> str:
        return format(str(self) if self._plain is MISSING else self._plain, spec)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Remote) and other._plain is MISSING and self._plain is MISSING:
            return self._number == other._number or self._link.ask("eq", self, other) is True
        own_value, other_value = plain_of(self), plain_of(other)
        return not is_remote(own_value, other_value) and own_value == other_value

    def __ne__(self, other: object) -> bool:
        return not self == other


class MISSING:
    """Marker of a `Remote` without content."""


def plain_of(thing: Any) -> Any:
    """Return the content of a `Remote` that has some; anything else unchanged."""
    return thing._plain if isinstance(thing, Remote) and thing._plain is not MISSING else thing


def is_remote(*things: Any) -> bool:
    """Return whether any of them is an object of the other process."""
    return any(isinstance(thing, Remote) for thing in things)


def special_methods() -> None:
    """Define on `Remote` the special methods that Python looks up on classes."""

    def unary(name: str, function: Any) -> Any:
        def method(self: Remote) -> Any:
            if self._plain is not MISSING:
                return function(self._plain)
            return self._link.ask(name, self)

        return method

    def binary(name: str, turned: Any) -> Any:
        function = getattr(operator, name)

        def method(self: Remote, other: Any) -> Any:
            pair = (other, self) if turned else (self, other)
            if not is_remote(*map(plain_of, pair)):
                return function(*map(plain_of, pair))
            if all(isinstance(one, Remote) for one in pair):
                return self._link.ask(name, *pair)
            return NotImplemented

        return method

    def item(name: str) -> Any:
        def method(self: Remote, *args: Any) -> Any:
            if self._plain is not MISSING and name in ("getitem", "contains"):
                return getattr(operator, name)(self._plain, *args)
            if name == "contains":
                raise TypeError("an object of the program does not support contains")
            return self._link.ask(name, self, *args)

        return method

    for name, function in UNARY.items():
        setattr(Remote, f"__{name}__", unary(name, function))
    for name in (*COMPARED, *BINARY):
        bare = name.rstrip("_")
        setattr(Remote, f"__{bare}__", binary(name, False))
        if name in BINARY:
            setattr(Remote, f"__r{bare}__", binary(name, True))
    for name in ITEMS:
        setattr(Remote, f"__{name}__", item(name))


special_methods()


class Link:
    """One end of the socket: calls the other process, and answers its calls meanwhile.

    Args:
        connection: The socket.
        guarded: Whether this is the test's end, which does not trust the other one's messages.
    """

    def __init__(self, connection: socket.socket, guarded: bool) -> None:
        self.file = connection.makefile("rwb")
        self.guarded = guarded
        self.lost = False
        self.names: dict[str, Any] = {}
        self._own: dict[int, Any] = {}
        self._numbers: dict[int, int] = {}
        self._errors: dict[int, Any] = {}
        self._calls = 0
        self._process = os.getpid()

    def ask(self, name: str, *args: Any, named: Any = None) -> Any:
        """Perform an operation in the other process; return its result or raise its error."""
        self._calls += 1
        number = self._calls
        named = named or {}
        encoded_args = [self.encode(one) for one in args]
        sent_named = {key: self.encode(one) for key, one in named.items()}
        self.send(["ask", number, name, encoded_args, sent_named])
        outcome, value, changes = self.answer(number)
        for position, form in changes.items():
            old = args[int(position)] if position.isdigit() else named[position]
            restore(old, self.decode(form))
        if outcome == "raise":
            raise self._error(value)
        return self.decode(value)

    def answer(self, number: int) -> tuple[str, Any, dict[str, Any]]:
        """Answer calls until a call's own answer arrives: "done" or "raise", the value, changes."""
        while True:
            message = self.receive()
            try:
                if message[0] == "ask":
                    self._serve(*message[1:])
                    continue
                outcome, answered, value, changes = message
                if outcome in ("done", "raise") and answered == number and type(changes) is dict:
                    return outcome, value, changes
            except (ValueError, TypeError, KeyError, IndexError):
                pass
            self._lose()

    def serve(self) -> NoReturn:
        """Answer calls forever."""
        while True:
            self._serve(*self.receive()[1:])

    def send(self, message: Any) -> None:
        """Send a message as JSON."""
        if os.getpid() != self._process:
            os._exit(0)  # a fork of the program, which has returned from its call too
        data = json.dumps(message).encode()
        try:
            self.file.write(data + b"\n")
            self.file.flush()
        except (OSError, ValueError):
            self._lose()

    def receive(self) -> Any:
        """Return the next message."""
        try:
            line = self.file.readline(LONGEST)
            if line.endswith(b"\n"):
                return json.loads(line)
        except (OSError, ValueError):
            pass
        self._lose()

    def _lose(self) -> NoReturn:
        self.lost = True
        raise Gone

    def reply(
        self, number: int, work: Any, args: Any = (), named: Any = None, forms: Any = ()
    ) -> None:
        """Run a function, and send its result and the changes to its arguments."""
        try:
            outcome, value = "done", self.encode(work(*args, **(named or {})))
        except Exception as error:
            outcome, value = "raise", self._told(error)
        changes = {}
        for position, form, one in forms:
            with suppress(Exception):
                if holds_mutable(one) and (new_form := self.encode(one)) != form:
                    changes[position] = new_form
        self.send([outcome, number, value, changes])

    def _serve(self, number: int, name: str, encoded_args: Any, sent_named: Any) -> None:
        try:
            args = [self.decode(form) for form in encoded_args]
            named = {key: self.decode(form) for key, form in sent_named.items()}
            if self.guarded:
                check_allowed(name, args)
            work = self._work(name)
        except Exception as error:
            self.send(["raise", number, self._told(error), {}])
            return
        forms = [(str(i), form, args[i]) for i, form in enumerate(encoded_args)]
        forms += [(key, form, named[key]) for key, form in sent_named.items()]
        self.reply(number, work, args, named, forms)

    def _work(self, name: str) -> Any:
        if name == "name":
            return lambda wanted: self.names[wanted]
        if name == "call":
            return lambda function, *args, **named: function(*args, **named)
        if name in ("getattr", "setattr", "delattr", "isinstance", "issubclass"):
            return getattr(builtins, name)
        if name in UNARY:
            return UNARY[name]
        if name in (*COMPARED, *BINARY, *ITEMS, "eq"):
            return getattr(operator, name)
        raise TypeError(f"{name} is not known")

    def encode(self, value: Any) -> Any:
        """Encode a value as JSON: data if its type is exactly a known one, else a number."""
        kind = type(value)
        if value is None or kind in (bool, str, float):
            return value
        # Hexadecimal for large ones: Python limits the digits of decimal conversions.
        if kind is int:
            return value if -(2**60) < value < 2**60 else ["int", hex(value)]
        name = kind.__name__
        if LISTS.get(name) is kind:
            return [name, [self.encode(one) for one in value]]
        if kind is defaultdict or MAPPINGS.get(name) is kind:
            return [name, [[self.encode(key), self.encode(one)] for key, one in value.items()]]
        if BYTES.get(name) is kind:
            return [name, value.hex()]
        if DATES.get(name) is kind:
            return [name, value.isoformat()]
        if kind is datetime.timedelta:
            return [name, [value.days, value.seconds, value.microseconds]]
        if kind is complex:
            return [name, [value.real, value.imag]]
        if kind is range:
            return [name, [self.encode(one) for one in (value.start, value.stop, value.step)]]
        if kind is slice:
            return [name, [self.encode(one) for one in (value.start, value.stop, value.step)]]
        if kind is Decimal:
            return [name, str(value)]
        if kind is Fraction:
            return [name, [self.encode(value.numerator), self.encode(value.denominator)]]
        return self._encode_object(value)

    def _encode_object(self, value: Any) -> Any:
        if isinstance(value, Remote) and value._link is self:
            return ["yours", value._number]
        if isinstance(value, type):
            if value in PLAIN or value is type(None):
                return ["type", value.__name__]
            if issubclass(value, BaseException):
                return self._encode_error_class(value)
        if isinstance(value, BaseException):
            return ["error", self._told(value)]
        if (numpy := sys.modules.get("numpy")) is not None:
            if isinstance(value, numpy.generic):
                return self.encode(value.item())
            if type(value) is numpy.ndarray and value.dtype.kind in "biufcUS":
                return ["array", [value.dtype.str, list(value.shape), self.encode(value.tolist())]]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            fields = [str(one) for one in value._fields]
            return ["named", [type(value).__name__, fields, [self.encode(one) for one in value]]]
        if self.guarded and (import_path := importable(value)):
            return ["import", import_path]
        base = next((one for one in BASES if isinstance(value, one)), None)
        return ["mine", self._number(value), *([self.encode(content(value, base))] if base else [])]

    def _number(self, value: Any) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._own)
            self._own[len(self._own)] = value  # referenced, so that its id is not reused
        return self._numbers[id(value)]

    def decode(self, form: Any) -> Any:
        """Decode a value that `encode` has encoded."""
        if type(form) is not list:
            return form
        name, *more = form
        payload = more[0]
        if name in LISTS:
            return LISTS[name]([self.decode(one) for one in payload])
        if name in MAPPINGS:
            return MAPPINGS[name]({self.decode(key): self.decode(one) for key, one in payload})
        if name in BYTES:
            return BYTES[name].fromhex(payload)
        if name in DATES:
            return DATES[name].fromisoformat(payload)
        if name == "mine":
            return Remote(self, int(payload), self.decode(more[1]) if len(more) > 1 else MISSING)
        if name == "yours":
            return self._own[payload]
        if name == "import" and not self.guarded:
            found = importlib.import_module(payload[0])
            for part in payload[1].split("."):
                found = getattr(found, part)
            return found
        return self._decode_rare(name, payload)

    def _decode_rare(self, name: str, payload: Any) -> Any:
        if name == "int":
            return int(payload, 16)
        if name == "timedelta":
            return datetime.timedelta(*payload)
        if name == "complex":
            return complex(*payload)
        if name in ("range", "slice", "Fraction"):
            kind = {"range": range, "slice": slice, "Fraction": Fraction}[name]
            return kind(*(self.decode(one) for one in payload))
        if name == "Decimal":
            return Decimal(payload)
        if name == "type":
            return next(one for one in (*PLAIN, type(None)) if one.__name__ == payload)
        if name == "class":
            return self._error_class(*payload)
        if name == "error":
            return self._error(payload)
        if name == "named":
            kind, fields, values = payload
            return namedtuple(kind, fields)(*(self.decode(one) for one in values))
        if name == "array":
            numpy = importlib.import_module("numpy")
            dtype = numpy.dtype(str(payload[0]))
            return numpy.array(self.decode(payload[2]), dtype=dtype).reshape(payload[1])
        raise TypeError(f"{name!r:.40} is not a value")

    def _encode_error_class(self, kind: type[BaseException]) -> list[Any]:
        nearest = next(one for one in kind.__mro__ if one.__module__ == "builtins")
        number_and_name = [] if kind is nearest else [self._number(kind), kind.__name__]
        return ["class", [nearest.__name__, *number_and_name]]

    def _error_class(self, base: Any, number: int | None = None, name: str = "") -> Any:
        known = getattr(builtins, base)
        if not (isinstance(known, type) and issubclass(known, Exception)):
            known = Gone  # SystemExit and the like count as the program's end
        if number is None or known is Gone:
            return known
        if number not in self._errors:
            self._errors[number] = type(str(name), (known,), {})
        return self._errors[number]

    def _told(self, error: BaseException) -> list[Any]:
        """Encode an error as JSON."""
        try:
            args = [self.encode(one) for one in error.args]
        except Exception:
            args = []
        return [self._encode_error_class(type(error))[1], args]

    def _error(self, payload: Any) -> BaseException:
        """Decode an error that `_told` has encoded."""
        try:
            (kind, args) = payload
            error_class = self._error_class(*kind)
            if error_class is Gone:
                self.lost = True
                return Gone()
            error = error_class.__new__(error_class)
            error.args = tuple(self.decode(one) for one in args)
            return error
        except Exception:
            return RuntimeError("an error that cannot be described")


def check_allowed(name: str, args: Any) -> None:
    """Check a request of the program for an object of the test: only objects it was passed.

    Functions may be called, but not inspected: their attributes lead to the test's own names.

    Raises:
        TypeError: It is not allowed.
    """
    if name in ("getattr", "setattr", "delattr"):
        target, attribute = args[0], args[1]
        instance = type(target).__module__ == "test" and not isinstance(target, type)
        if type(attribute) is str and not attribute.startswith("_") and instance:
            return
    elif name == "call" or name in UNARY or name in (*COMPARED, *BINARY, *ITEMS, "eq"):
        return
    raise TypeError(f"{name} is not allowed on an object of the test")


def importable(value: Any) -> list[str] | None:
    """Return module and name of a function or class of the standard library, or `None`."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if type(module) is not str or type(name) is not str or isinstance(value, types.MethodType):
        return None
    if module.partition(".")[0] not in sys.stdlib_module_names:
        return None
    found = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return [module, name] if found is value else None


def content(value: Any, base: Any) -> Any:
    """Return the content of an instance of a built-in type's subclass, as exactly that type."""
    if base in (int, float):
        return base.__add__(value, base(0))
    if base is str:
        return "".join(str.__iter__(value))
    if base is bytes:
        return bytes(bytes.__iter__(value))
    return base(dict.items(value) if base is dict else base.__iter__(value))


def holds_mutable(value: Any) -> bool:
    """Return whether a call may have changed the value."""
    return type(value) in MUTABLE or (type(value) is tuple and any(map(holds_mutable, value)))


def restore(old: Any, new: Any) -> None:
    """Update a passed value in place to its state after the call."""

    def kept(old_value: Any, new_value: Any) -> Any:
        if type(old_value) is type(new_value) and holds_mutable(old_value):
            restore(old_value, new_value)
            return old_value
        return new_value

    if type(old) is tuple and type(new) is tuple:
        for pair in zip(old, new, strict=False):
            kept(*pair)
    elif isinstance(old, dict):
        restored = {key: kept(old[key], one) if key in old else one for key, one in new.items()}
        old.clear()
        old.update(restored)
    elif isinstance(old, set):
        old.clear()
        old.update(new)
    elif isinstance(old, list | deque):
        pairs = [kept(*pair) for pair in zip(old, new, strict=False)]
        merged = [*pairs, *list(new)[len(pairs) :]]
        old.clear()
        old.extend(merged)
    elif isinstance(old, bytearray):
        old[:] = new


class Names(dict):
    """The test's global names; names that it does not define are looked up in the program.

    Python's builtins are the test's own, unless the item's prompt requests one of that name; so are
    modules that it names without an import.
    """

    def __init__(self, link: Link, asked: Any, modules: Any) -> None:
        super().__init__(__name__="test", __builtins__=builtins)
        self._link, self._asked, self._modules = link, asked, modules

    def __missing__(self, name: str) -> Any:
        if name.startswith("__"):
            raise KeyError(name)
        if name not in self._asked:
            if hasattr(builtins, name):
                raise KeyError(name)
            if name in self._modules:
                with suppress(ImportError):
                    return importlib.import_module(self._modules[name])
        return self._link.ask("name", name)


def judge(link: Link, task: dict[str, Any], verdict: int) -> NoReturn:
    """Run the test; writes "passed", "failed", "unreadable", or "absent" without a program."""

    def end(outcome_word: str) -> NoReturn:
        os.write(verdict, outcome_word.encode())
        os._exit(0)

    try:
        link.receive()
    except Gone:
        end("absent")
    try:
        if not link.receive():
            end("unreadable")
        outcome, _, _ = link.answer(0)
        if outcome == "raise":
            end("failed")
        names = Names(link, set(task["requested"]), task["modules"])
        program = sys.modules["program"] = types.ModuleType("program")
        vars(program)["__getattr__"] = names.__getitem__
        for imported in task["imports"]:
            with suppress(ImportError):
                exec(imported, names)
        exec(compile(task["test"], "test", "exec"), names)
    except BaseException:
        end("failed")
    end("failed" if link.lost else "passed")


def play(link: Link, task: dict[str, Any]) -> None:
    """Run the first of the programs that is Python, then answer the test."""
    link.send("here")
    program = readable(task["programs"])
    link.send(program is not None)
    if program is None:
        return
    module = sys.modules["program"] = types.ModuleType("program")
    link.names = vars(module)
    link.reply(0, lambda: exec(program, vars(module)))
    link.serve()


def readable(programs: Sequence[str]) -> types.CodeType | None:
    """Return the first program that compiles."""
    for one in programs:
        try:
            return compile(one, "program", "exec")
        except BaseException:
            continue
    return None
