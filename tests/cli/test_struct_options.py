"""Options of a command that come from a struct."""

from __future__ import annotations

from typing import Annotated, Any

import click
import msgspec
import pytest
from click.testing import CliRunner

from kvsm.cli.struct_options import struct_options
from kvsm.errors import ConfigError
from kvsm.system.field_types import check_values, says


class Cup(msgspec.Struct, frozen=True, kw_only=True):
    size_ml: Annotated[int, says("How much it holds.", 1, 500)] = 250
    sugar: Annotated[int, says("Lumps.", 0)] = 0
    kind: Annotated[str | None, says("What it is made of.", choices=("glass", "tin"))] = None
    lid: Annotated[bool, says("Whether it closes.")] = False

    def __post_init__(self) -> None:
        check_values(self)


@click.command()
@struct_options(Cup, flags={"size_ml": "--size"}, metavars={"size_ml": "ML"})
def fill(**options: Any) -> None:
    click.echo(msgspec.json.encode(Cup(**options)).decode())


def test_each_field_is_an_option_with_its_default() -> None:
    assert msgspec.json.decode(CliRunner().invoke(fill, []).stdout, type=Cup) == Cup()
    given = ["--size", "100", "--sugar", "2", "--kind", "tin", "--lid"]
    made = msgspec.json.decode(CliRunner().invoke(fill, given).stdout, type=Cup)
    assert made == Cup(size_ml=100, sugar=2, kind="tin", lid=True)


def test_the_help_says_what_the_fields_say() -> None:
    lines = [line.split() for line in CliRunner().invoke(fill, ["--help"]).stdout.splitlines()]
    assert ["--size", "ML", "How", "much", "it", "holds.", "[default:", "250]"] in lines
    assert ["--kind", "[glass|tin]", "What", "it", "is", "made", "of."] in lines
    assert ["--lid", "Whether", "it", "closes."] in lines


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"size_ml": 501}, "size_ml is 501; it must be from 1 to 500"),
        ({"sugar": -1}, "sugar is -1; it must be 0 or more"),
        ({"kind": "paper"}, "kind is 'paper'; choose one of glass, tin"),
    ],
)
def test_the_struct_refuses_what_its_fields_exclude(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Cup(**wrong)
