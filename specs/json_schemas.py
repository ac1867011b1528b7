"""JSON Schemas of the output of `--json`, from the structs in `kvsm.cli.schemas`.

The lines "name: meaning" of a struct's docstring, and the indented lines after each, become the descriptions
of its fields.
"""

from __future__ import annotations

import json
import re
from inspect import cleandoc
from typing import Any

import msgspec

from kvsm.cli.exit_codes import ExitCode
from kvsm.cli.schemas import SCHEMAS
from kvsm.properties import Property

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_TITLE = {"enum": [one.title for one in Property], "description": "The title of the property."}
_FREE_TITLE = {"type": "string", "description": "The title of the property."}

_PAGE = """\
# kvsm in scripts

<!-- Written by `PYTHONPATH=specs python -m write_docs` from kvsm/cli. Do not edit. -->

The result of a command goes to standard output. Notes, progress and errors go to standard error.

## Exit codes

A code has the same meaning in every command. The help of a command says what it means there.

| code | meaning |
| --- | --- |
{exit_codes}
## What `--json` prints

With `--json` a command prints JSON objects, one on each line, and nothing else on standard output. The first
key of each is `schema`: its name and version. Within a version a schema may gain fields, so ignore the fields
that you do not know. A field that goes, or means something else, makes the next version. Text is ASCII: other
characters are escaped. A property has its id in `property_id` and its title in `property`.

| `schema` | printed by | what it is |
| --- | --- | --- |
{schemas}
## Completion

Press the tabulator key for commands, options and directories, once your shell knows how:

```sh
eval "$(_KVSM_COMPLETE=bash_source kvsm)"             # in ~/.bashrc
eval "$(_KVSM_COMPLETE=zsh_source kvsm)"              # in ~/.zshrc
_KVSM_COMPLETE=fish_source kvsm | source              # in ~/.config/fish/completions/kvsm.fish
```

## Colours

On a terminal a verdict is green, yellow or red. Its words say the same. `NO_COLOR=1` turns the colours off.
"""


def file_name(name: str) -> str:
    """The file of a schema: `verify-1.json` for "kvsm.verify/1"."""
    return f"{name.removeprefix('kvsm.').replace('/', '-')}.json"


def schema_texts() -> dict[str, str]:
    """File name -> the text of the schema."""
    return {file_name(name): json.dumps(json_schema(kind), indent=2) + "\n" for name, kind in SCHEMAS.items()}


def scripts_page() -> str:
    """The text of docs/scripts.md."""
    rows = []
    for name, kind in SCHEMAS.items():
        first = str(json_schema(kind)["description"]).split("\n")[0]
        command, _, said = first.removeprefix("What ").partition(" prints: ")
        rows.append(f"| [`{name}`](schemas/{file_name(name)}) | {command} | {said} |\n")
    codes = [f"| {one.value} | {one.says} |\n" for one in ExitCode]
    return _PAGE.format(exit_codes="".join(codes), schemas="".join(rows))


def json_schema(kind: type) -> dict[str, Any]:
    """The schema of a struct, with descriptions from docstrings."""
    (whole,), parts = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    for part in parts.values():
        _describe(part)
        _put_null_last(part)
    top = parts.pop(whole["$ref"].rpartition("/")[2])
    return {"$schema": _DIALECT, **top, "$defs": parts}


def _put_null_last(part: Any) -> None:
    """Move "null" to the end of alternatives, because versions of msgspec differ in their order."""
    if isinstance(part, dict):
        part.get("anyOf", []).sort(key=lambda one: one == {"type": "null"})
    for inner in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        _put_null_last(inner)


def _describe(part: dict[str, Any]) -> None:
    """Move the lines about fields from the description of an object to its fields."""
    fields = part.get("properties", {})
    left: list[str] = []
    named: list[str] = []
    for line in cleandoc(part.get("description", "")).split("\n"):
        if named and line.startswith("    "):
            for name in named:
                fields[name]["description"] += f" {line.strip()}"
            continue
        names, colon, said = line.partition(": ")
        named = names.split(", ") if colon and all(name in fields for name in names.split(", ")) else []
        for name in named:
            fields[name]["description"] = said
        if not named:
            left.append(line)
    part["description"] = re.sub(r"\n\n+", "\n\n", "\n".join(left)).strip()
    if "property_id" in fields:
        # Printing adds it: `kvsm.properties.json_with_titles`.
        title = _TITLE if "$ref" in fields["property_id"] else _FREE_TITLE
        part["properties"] = {**fields, "property": title}
