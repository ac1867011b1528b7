"""The generated tables of docs/vllm.md: the methods that vLLM calls, and vLLM's own options."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvsm.vllm.interface_table import INTERFACES, PROPERTY, Method
from kvsm.vllm.vllm_options import OPTIONS

_BLOCK = re.compile(r"(<!-- written: (methods|options) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_vllm_tables(page: str) -> str:
    """The page with up-to-date generated tables."""
    tables = {"methods": _methods, "options": _options}
    return _BLOCK.sub(lambda found: found[1] + "".join(tables[found[2]]()) + found[3], page)


def _methods() -> Iterator[str]:
    yield "| class of vLLM | method | what kvsm does | test |\n| --- | --- | --- | --- |\n"
    for name, interface in INTERFACES.items():
        for one in interface.methods:
            yield f"| `{name}` | {_signature(one)} | {_does(one)} | `{one.test}` |\n"


def _signature(method: Method) -> str:
    written = method.name if method.parameters == PROPERTY else f"{method.name}({method.parameters})"
    return f"`{written}`{_since(method.since)}"


def _does(method: Method) -> str:
    return f"inherited. {method.does}" if method.inherited else method.does


def _options() -> Iterator[str]:
    yield "| option | whose | KvsmConnector | | test |\n| --- | --- | --- | --- | --- |\n"
    for one in OPTIONS:
        taken = "yes" if one.connector else "refused"
        title = f"`{one.name}`{_since(one.since)}"
        yield f"| {title} | {one.readers} | {taken} | {one.answer} | `{one.test}` |\n"


def _since(version: str) -> str:
    return f", since {version}" if version else ""
