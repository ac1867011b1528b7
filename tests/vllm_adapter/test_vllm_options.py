"""The error for an option of vLLM's own offload connectors that kvsm refuses."""

from __future__ import annotations

import pytest

from kvsm.errors import ConfigError
from kvsm.vllm.extra_config import ConnectorOptions, described, parse
from kvsm.vllm.kv_cache_config import host_slots
from kvsm.vllm.vllm_options import OPTIONS, Option

OURS = ConnectorOptions.__struct_fields__
REFUSED = [one for one in OPTIONS if not one.connector]


@pytest.mark.parametrize("name", OURS)
def test_each_option_of_kvsm_is_described(name: str) -> None:
    assert described(name).endswith(".")


@pytest.mark.parametrize("option", REFUSED, ids=[one.name for one in REFUSED])
def test_a_refused_option_says_what_kvsm_has_instead_in_the_words_of_kvsms_own_option(option: Option) -> None:
    """So no reason describes an old kvsm: "not to disk" was still printed after the disk tier existed."""
    with pytest.raises(ConfigError) as refused:
        parse(ConnectorOptions, {"cpu_bytes_to_use": 1 << 20, option.name: 1})
    message = str(refused.value)
    assert f"{option.name!r}, an option of vLLM's own offload; omit it." in message
    assert set(option.instead) <= set(OURS)
    assert [name for name in option.instead if f"{name!r}: {described(name)}" not in message] == []
    assert option.instead or option.why
    assert [name for name in OURS if "_" in name and name in option.why] == []


@pytest.mark.parametrize(
    "name", ["disk_path", "secondary_tiers", "kv_offload_backend", "disk_capacity_bytes"]
)
def test_who_asks_for_a_disk_hears_of_the_disk_tier(name: str) -> None:
    with pytest.raises(ConfigError, match=r"KvsmConnector has 'disk_(dir|bytes)'"):
        parse(ConnectorOptions, {"cpu_bytes_to_use": 1 << 20, name: 1})


def test_a_policy_that_refuses_stores_needs_no_disk_to_be_refused() -> None:
    """It is told before any file of the disk is made."""
    given = {"cpu_bytes_to_use": 1 << 20, "policy": "auto"}
    assert parse(ConnectorOptions, given).policy == "auto"
    with pytest.raises(ConfigError, match="policy 'auto' refuses stores"):
        parse(ConnectorOptions, {**given, "disk_dir": "/there", "disk_bytes": 1 << 20})


def test_hits_on_a_disk_cannot_be_declined() -> None:
    """Nothing measures copies from the disk, so one slow estimate would keep its blocks there for good."""
    given = {"cpu_bytes_to_use": 1 << 20, "load_only_if_faster": True}
    assert parse(ConnectorOptions, given).load_only_if_faster
    with pytest.raises(ConfigError, match="with a disk tier, omit it"):
        parse(ConnectorOptions, {**given, "disk_dir": "/there", "disk_bytes": 1 << 20})


@pytest.mark.parametrize(("ranks", "chunk", "slots"), [(1, 1, 10), (2, 1, 5), (1, 3, 3), (2, 2, 2)])
def test_host_memory_is_divided_over_ranks_and_chunks(ranks: int, chunk: int, slots: int) -> None:
    """Blocks of 1,000 bytes on each rank."""
    options = parse(ConnectorOptions, {"cpu_bytes_to_use": 10_500})
    assert host_slots(options.host_bytes(ranks), ranks, 1_000 * chunk) == slots


def test_bytes_per_rank_are_as_many_as_bytes_of_all_ranks() -> None:
    alone = parse(ConnectorOptions, {"cpu_bytes_to_use_per_rank": 25})
    together = parse(ConnectorOptions, {"cpu_bytes_to_use": 100})
    assert alone.host_bytes(4) == together.host_bytes(4) == 100
