"""Record the calls of the user's objects and their answers, so that an error names the user's line.

A wrong answer seldom fails at once. It fails later, inside kvsm, as a `KeyError` that explains nothing. So a
machine records the calls of the objects that it tests. An error that ends a rule becomes a `PropertyBroken`
that names the property, the last call with its answer, and the user's line that raised the error or returned
the answer. For any other broken property, the place is the line of the user's method that wrote the wrong
bytes, or else of the one that was called last.
"""

from __future__ import annotations

import functools
import inspect
import re
import reprlib
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import SkipTest

import hypothesis
from hypothesis.errors import HypothesisException

from kvsm.check.worlds.check_counts import count_case
from kvsm.errors import ConfigError, PropertyBroken, described, raised_at
from kvsm.properties import Property
from kvsm.testing.unrepeatable import Unrepeatable, unrepeatable

POLICY = "policy"
"""The kind of object whose calls a replay repeats."""

MOST_CALLS = 100
"""Most calls that are kept; they are the last ones."""

_NOT_THEIRS = (str(Path(__file__).parents[1]), str(Path(hypothesis.__file__).parent), "<")
"""Prefixes of file names that are not the user's: kvsm, Hypothesis, code without a file."""

_STANDARD = sysconfig.get_path("stdlib")

_INSTALLED = "site-packages/"

_KEY = re.compile(r"b'([\w-]+)(?:\\x00){4}'")
"""A key of group 0 whose hash is a name."""

_shown = reprlib.Repr()
_shown.maxlevel, _shown.maxlist, _shown.maxtuple, _shown.maxset, _shown.maxdict = 4, 8, 8, 8, 8
_shown.maxstring = _shown.maxother = 120


class Call:
    """One call of a method of the user's object.

    owner: the kind of object, such as "copy engine".
    words: the call as text.
    code: the method or its class, to find its line.
    is_theirs: whether the user wrote the method; False: it is inherited from a class that is not the user's.
    """

    def __init__(self, owner: str, words: str, code: Any, is_theirs: bool) -> None:
        self.owner, self.words, self._code, self.is_theirs = owner, words, code, is_theirs
        self.outcome = "has not returned"

    @property
    def place(self) -> str:
        """FILE:LINE of the method."""
        return _place(self._code)

    def __str__(self) -> str:
        return f"{self.words} {self.outcome}".rstrip()

    def named(self) -> str:
        """The call with its object and its place."""
        return f"{self.words} of your {self.owner} ({self.place})"


class UnderTest:
    """The user's objects in one run of a machine."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        """The latest calls from outside of these objects, the oldest first."""
        self._roots: set[str] = set()
        """Prefixes of the names of installed files that are the user's."""
        self._about: tuple[str, Any] | None = None
        self.suspect: Call | None = None
        """The call that wrote the wrong bytes of the present failure, if it is about bytes."""
        self._unrepeatable: list[Unrepeatable] = []
        self._depth = 0

    def is_about(self, kind: str, code: Any) -> None:
        """Declare a class of the user that kvsm itself instantiates: an error before any call is about it."""
        self._about = kind, code

    def watch(self, thing: Any, kind: str, names: Iterable[str], made_by: Callable[..., Any]) -> None:
        """Record the calls of a user's object from now on.

        kind: the kind of object, for messages, such as "copy engine".
        names: the methods that it must have.
        made_by: the user's method that made it.

        Raises `PropertyBroken` (every call is legal) if it lacks one of the methods.
        """
        names = tuple(names)
        missing = [name for name in names if not callable(getattr(thing, name, None))]
        if missing:
            lacks = ", ".join(f"{name}()" for name in missing)
            place = _place(type(thing) if _root(type(thing)) else made_by)
            raise PropertyBroken(
                Property.LEGAL_CALLS,
                f"your {kind} is {_show(thing)}, which has no {lacks}; see {place}",
                place,
            )
        self._roots.update(filter(None, map(_root, type(thing).__mro__)))
        try:
            thing.__class__ = self._watching(type(thing), kind, names)
        except TypeError:
            return  # The class cannot be replaced (extension types): its errors are shown without the call.

    def _watching(self, theirs: type, kind: str, names: Iterable[str]) -> type:
        """Make a subclass whose methods of these names record their calls here."""
        body: dict[str, Any] = {"__slots__": (), "__module__": theirs.__module__, "__doc__": theirs.__doc__}
        body["__qualname__"] = theirs.__qualname__
        for name in names:
            if inspect.isfunction(method := getattr(theirs, name, None)):
                body[name] = self._noting(method, name, kind, theirs)
        return type(theirs.__name__, (theirs,), body)

    @contextmanager
    def repeatable(self) -> Iterator[None]:
        """Record whether the user's code inside of this context reads a clock or draws unseeded random
        numbers."""
        with unrepeatable(self._line_of) as found:
            yield
        self._unrepeatable += found

    def _line_of(self, frame: FrameType | None) -> str:
        """The user's line that called into the standard library; empty if other code or a logger made the
        call."""
        while frame is not None and frame.f_code.co_filename.startswith(_STANDARD):
            if frame.f_globals.get("__name__") == "logging" or _INSTALLED in frame.f_code.co_filename:
                break
            frame = frame.f_back
        if frame is None or self._is_hidden(frame.f_code.co_filename):
            return ""
        return f"{frame.f_code.co_filename}:{frame.f_lineno}"

    def _noting(self, method: Callable[..., Any], name: str, kind: str, theirs: type) -> Callable[..., Any]:
        code = method if _root(method) else theirs

        @functools.wraps(method)
        def call(thing: Any, *arguments: Any, **named: Any) -> Any:
            if self._depth:
                return method(thing, *arguments, **named)
            shown = [*map(_show, arguments), *(f"{word}={_show(value)}" for word, value in named.items())]
            noted = Call(kind, f"{name}({', '.join(shown)})", code, code is method)
            self.calls.append(noted)
            count_case(Property.LEGAL_CALLS, f"calls of the {kind}")
            del self.calls[:-MOST_CALLS]
            self._depth += 1
            try:
                with self.repeatable() if kind == POLICY else nullcontext():
                    answer = method(thing, *arguments, **named)
            except BaseException as error:
                noted.outcome = f"raised {described(error)}"
                raise
            finally:
                self._depth -= 1
            noted.outcome = "" if answer is None else f"answered {_show(answer)}"
            return answer

        return call

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Convert errors inside this context that the user's objects cause to `PropertyBroken`."""
        __tracebackhide__ = True
        self.suspect = None
        try:
            yield
            self._must_be_repeatable()
        except PropertyBroken as error:
            self._must_be_repeatable()
            error.place = error.place or self._suspected_place()
            raise
        except (HypothesisException, SkipTest):
            raise
        except (Exception, SystemExit) as error:
            self._must_be_repeatable()
            place, line = raised_at(error, self._is_hidden)
            if place:
                raise PropertyBroken(
                    Property.LEGAL_CALLS,
                    f"{self._what()} raised {described(error)}, at {place}: {line}",
                    place,
                ) from error
            within, _ = raised_at(error, lambda _: False)
            if not self.calls:
                if self._about is None or isinstance(error, ConfigError):
                    raise  # The user's objects are not involved, or the error explains itself.
                kind, code = self._about
                raise PropertyBroken(
                    Property.LEGAL_CALLS,
                    f"kvsm cannot use your {kind}: {described(error)} (found at {within}); "
                    f"it is at {_place(code)}",
                ) from None
            # A traceback inside kvsm does not help the user, so the error is not shown as the cause.
            last = self.calls[-1]
            raise PropertyBroken(
                Property.LEGAL_CALLS,
                f"your {last.owner}, called with {last.words}, {last.outcome or 'answered None'}, "
                f"and kvsm cannot go on: {described(error)} (found at {within}); "
                f"the method is at {last.place}",
                last.place,
            ) from None

    def _must_be_repeatable(self) -> None:
        """Raise `PropertyBroken` (determinism) if the user's policy did what a replay cannot repeat."""
        if self._unrepeatable:
            first, self._unrepeatable = self._unrepeatable[0], []
            raise PropertyBroken(
                Property.DETERMINISM,
                f"the policy {first.does}; a replay of the log would get another answer. Decide by the calls "
                "alone: count them, or keep the state of a seeded generator in the snapshot",
                first.place,
            ) from None

    def _suspected_place(self) -> str:
        """The line of the method that wrote the wrong bytes, or else of the one that was called last. Methods
        that the user wrote come before inherited ones, for which it is the line of the class.
        """
        latest = ([self.suspect] if self.suspect else []) + self.calls[::-1]
        call = next((call for call in latest if call.is_theirs), latest[0] if latest else None)
        return call.place if call is not None else ""

    def _is_hidden(self, file: str) -> bool:
        """Whether a file is not the user's. Of installed packages, only those of the user's objects are."""
        if file.startswith(_NOT_THEIRS):
            return True
        if _INSTALLED in file:
            return not file.startswith(tuple(self._roots))
        return file.startswith(_STANDARD)

    def _what(self) -> str:
        """Name the user's object and call that raised an error; `your code` if it was no recorded call."""
        if self.calls and self.calls[-1].outcome.startswith("raised"):
            return f"your {self.calls[-1].owner}, called with {self.calls[-1].words},"
        return "your code"


def _show(value: Any) -> str:
    """Show a value briefly: a request or its context as the request's name, a key without its group."""
    request = getattr(value, "req_id", None) or getattr(value, "request_id", None)
    return request if isinstance(request, str) else _KEY.sub(r"\1", _shown.repr(value))


def _root(code: Any) -> str:
    """The prefix of the file names of this class or method: its package if it is installed, else its file.

    Empty if the file is not the user's.
    """
    try:
        file = inspect.getfile(code)
    except (TypeError, OSError):
        return ""
    before, installed, within = file.rpartition(_INSTALLED)
    if file.startswith(_NOT_THEIRS) or (file.startswith(_STANDARD) and not installed):
        return ""
    return f"{before}{installed}{within.partition('/')[0]}" if installed else file


def _place(code: Any) -> str:
    """FILE:LINE where a class or a method begins."""
    try:
        return f"{inspect.getfile(code)}:{inspect.getsourcelines(code)[1]}"
    except (TypeError, OSError):
        return getattr(code, "__qualname__", repr(code))
