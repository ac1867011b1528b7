"""Checks the arguments of the core's calls: accepts, converts or refuses them.

Events are written without a check of their fields, and decoded by their declared types. So an argument of a
wrong type would make a log that cannot be read, or an event that cannot be written. Each call checks its
arguments before it changes anything: a refused call has no effect, and its error names call and argument.

An integer may be of any type that has `__index__`, such as a numpy integer. A flag may be a numpy boolean.
Both are converted. A call itself tests for the usual type, which takes 15 ns, and calls these functions only
for other types.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import wraps
from typing import Annotated, Any, TypeVar, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvsm.errors import WrongArgument
from kvsm.events import ERROR_CHARACTERS_MAX, Offer, Owners
from kvsm.ids import SMALL, IdArray

KEY_BYTES_MAX = 1 << 12
"""The longest key. vLLM's keys have 36 bytes."""

_BYTES: set[type] = {bytes}
_INT64 = np.dtype(np.int64)
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1
"""The range of 64-bit integers."""

_Call = TypeVar("_Call", bound=Callable[..., Any])

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class _Offers(msgspec.Struct, array_like=True, gc=False):
    """The type of offers for msgspec, which checks them faster than Python code."""

    offers: tuple[tuple[str, tuple[_Count, ...], tuple[_Count, ...]], ...]


def integer(call: str, argument: str, value: object) -> int:
    """Convert to a 64-bit integer, or raise `WrongArgument`."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise WrongArgument(call, argument, f"is {a(value)}; it must be an int") from None
    if not _LEAST <= number <= _MOST:
        raise WrongArgument(call, argument, "does not fit in 64 bits")
    return number


def flag(call: str, argument: str, value: object) -> bool:
    """Convert to a bool. An int is refused: it may be a worker number that was passed in the wrong place."""
    if not isinstance(value, bool | np.bool_):
        raise WrongArgument(call, argument, f"is {a(value)}; it must be True or False")
    return bool(value)


def request_name(call: str, value: object, argument: str = "request") -> str:
    """Return a request name that a log can hold, or raise `WrongArgument`."""
    if not isinstance(value, str):
        raise WrongArgument(call, argument, f"is {a(value)}; the name of a request is a str")
    name = str.__str__(value)
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise WrongArgument(call, argument, f"cannot be written: {error}") from None
    return name


def checks_request(call: _Call) -> _Call:
    """Decorate a call of the core: check its first argument, `request`, before the call runs."""
    name = call.__name__

    @wraps(call)
    def checked(core: Any, request: Any, *others: Any, **named: Any) -> Any:
        if type(request) is not str or not request.isascii():
            request = request_name(name, request)
        return call(core, request, *others, **named)

    return cast(_Call, checked)


def source_name(call: str, value: object) -> str:
    """Return the source of a store that does not copy from the device, as a log can hold it."""
    if not isinstance(value, str) or not value:
        raise WrongArgument(call, "source", f"is {value!r:.80}; it must say where the bytes come from")
    return request_name(call, value, "source")


def weights_version(call: str, value: object) -> str:
    """Return a version of model weights that a log can hold."""
    if not isinstance(value, str):
        raise WrongArgument(call, "weights", f"is {a(value)}; the version of weights is a str")
    return request_name(call, value, "weights")


def worker_error(call: str, value: object) -> str:
    """Return the error of a copy as a log can hold it: cut to `ERROR_CHARACTERS_MAX`. Characters that cannot
    be encoded, as in messages of an operating system, become escapes."""
    if not isinstance(value, str):
        raise WrongArgument(call, "error", f"is {a(value)}; what went wrong is told as a str")
    text = str.__str__(value)[: ERROR_CHARACTERS_MAX + 1].encode(errors="backslashreplace").decode()
    return text if len(text) <= ERROR_CHARACTERS_MAX else text[: ERROR_CHARACTERS_MAX - 3] + "..."


def one_key(call: str, argument: str, value: object) -> bytes:
    """Return a key, or raise `WrongArgument`. A bytearray is refused, because its owner may change it
    later."""
    if not isinstance(value, bytes):
        raise WrongArgument(call, argument, f"is {a(value)}; a key is bytes")
    if len(value) > KEY_BYTES_MAX:
        raise WrongArgument(call, argument, f"has {len(value)} bytes; a key has at most {KEY_BYTES_MAX}")
    return bytes(value)


def keys_of(call: str, keys: Sequence[bytes]) -> tuple[bytes, ...]:
    """Return a sequence of keys as a tuple."""
    plain = (type(keys) is list or type(keys) is tuple) and set(map(type, keys)) <= _BYTES
    if plain and max(map(len, keys), default=0) <= KEY_BYTES_MAX:
        return tuple(keys)
    return tuple([one_key(call, f"keys[{n}]", key) for n, key in enumerate(items(call, "keys", keys))])


def parents_of(call: str, parents: Mapping[int, bytes]) -> Mapping[int, bytes]:
    """Check the map from places in an offer to the keys of preceding blocks. Places beyond the offer are
    ignored by the call."""
    if not isinstance(parents, Mapping):
        raise WrongArgument(call, "parents", f"is {a(parents)}; it maps places in the offer to keys")
    return {integer(call, "parents", n): one_key(call, f"parents[{n}]", key) for n, key in parents.items()}


def integers(call: str, argument: str, values: Sequence[int]) -> tuple[int, ...]:
    """Return a short sequence of integers as a tuple."""
    if type(values) is list or type(values) is tuple:
        for one in values:
            if type(one) is not int:
                break
        else:
            return tuple(values)
    return _each_integer(call, argument, values)


def _each_integer(call: str, argument: str, values: object) -> tuple[int, ...]:
    found = items(call, argument, values)
    return tuple([integer(call, f"{argument}[{n}]", one) for n, one in enumerate(found)])


def ids_of(call: str, argument: str, values: Any) -> IdArray:
    """Return a batch of integers in the ledger's form: a tuple, or an array if there are more than
    `SMALL`."""
    kind = type(values)
    if kind is range:
        many = len(values) > SMALL
        return np.arange(values.start, values.stop, values.step) if many else tuple(values)
    if (kind is list or kind is tuple) and len(values) <= SMALL:
        return integers(call, argument, values)
    array = _plain_array(values)
    if array is None:
        numbers = _each_integer(call, argument, values)
        return np.array(numbers, dtype=np.int64) if len(numbers) > SMALL else numbers
    return array if len(array) > SMALL else tuple(array.tolist())


def _plain_array(values: object) -> NDArray[np.int64] | None:
    """Return a list or an array of plain integers as an array; None for other values."""
    if not isinstance(values, list | tuple | np.ndarray):
        return None
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):
        return None
    return array if array.dtype == _INT64 and array.ndim == 1 else None


def owners_of(call: str, owners: Owners, keys: int) -> Owners:
    """Check the (request, number of keys) pairs of a batch. They must cover all its keys, or be empty.

    A request with 0 keys is left out, so that no log names it as an owner.
    """
    if type(owners) is tuple and not owners:
        return owners
    if not _are_plain(owners):
        pairs = items(call, "owners", owners)
        owners = tuple([_owner(call, f"owners[{n}]", pair) for n, pair in enumerate(pairs)])
    counts = [count for _, count in owners]
    if owners and sum(counts) != keys:
        raise WrongArgument(call, "owners", f"have {sum(counts)} keys, and the batch has {keys}")
    return owners if all(counts) else tuple([one for one in owners if one[1]])


def _are_plain(owners: Owners) -> bool:
    if type(owners) is not tuple:
        return False
    for owner in owners:
        if type(owner) is not tuple or len(owner) != 2:
            return False
        name, count = owner
        if type(name) is not str or type(count) is not int or not name.isascii() or count < 0:
            return False
    return True


def _owner(call: str, argument: str, pair: Any) -> tuple[str, int]:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise WrongArgument(call, argument, f"is {a(pair)}; it must be (request, number of keys)")
    name, count = pair
    count = integer(call, f"{argument}[1]", count)
    if count < 0:
        raise WrongArgument(call, f"{argument}[1]", f"is {count}; it must be 0 or more")
    return request_name(call, name, f"{argument}[0]"), count


def offers_of(call: str, offers: Sequence[Offer]) -> tuple[Offer, ...]:
    """Check the cursors of requests: (request, settled, offered)."""
    if type(offers) is list or type(offers) is tuple:
        try:
            checked = msgspec.convert((offers,), _Offers).offers
            for name, _, _ in checked:
                if type(name) is not str or not name.isascii():
                    break
            else:
                return checked
        except (msgspec.ValidationError, UnicodeEncodeError):
            pass
    return tuple([_offer(call, f"offers[{n}]", one) for n, one in enumerate(items(call, "offers", offers))])


def _offer(call: str, argument: str, one: Any) -> Offer:
    if not isinstance(one, tuple | list) or len(one) != 3:
        raise WrongArgument(call, argument, f"is {a(one)}; it must be (request, settled, offered)")
    name, *cursors = one
    settled = _each_integer(call, f"{argument}[1]", cursors[0])
    offered = _each_integer(call, f"{argument}[2]", cursors[1])
    if min((*settled, *offered), default=0) < 0:
        raise WrongArgument(call, argument, "counts blocks below 0")
    return request_name(call, name, f"{argument}[0]"), settled, offered


def items(call: str, argument: str, values: object) -> list[Any]:
    """List the items of a sequence. Text and bytes are refused, and so are sets, maps and generators, whose
    items have no places."""
    kind = type(values)
    if not hasattr(kind, "__getitem__") or isinstance(values, str | bytes | bytearray | Mapping | Set):
        raise WrongArgument(call, argument, f"is {a(values)}; it must be a sequence, such as a list")
    try:
        return list(cast(Iterable[Any], values))
    except TypeError as error:  # A zero-dimensional array is no sequence.
        raise WrongArgument(call, argument, f"is no sequence: {error}") from None


def a(value: object) -> str:
    """Return the type of a value with its article: "a list"."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
