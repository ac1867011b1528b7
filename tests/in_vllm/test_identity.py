"""Everything that decides the bytes of a block changes the facts that two starts, or two engines, compare.
Each field of vLLM's configuration and each extra key of a block hash is changed, one at a time."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from enum import Enum
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from config_fields import COUNTED
from vllm.config import KVTransferConfig
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

from kvsm.check.vllm_fuzz.configs import changed, make_config, make_kv_cache_config
from kvsm.copies import KeptPool
from kvsm.copies.host_pools.kept_record import check_kept
from kvsm.identity import PoolIdentity
from kvsm.tiers.disk.formats import SUPERBLOCK_BYTES
from kvsm.vllm.config_exceptions import BETWEEN_ENGINES, EXCEPTIONS
from kvsm.vllm.config_facts import MOST_CHARACTERS, default_of, is_config, plain, short
from kvsm.vllm.extra_config import ConnectorOptions
from kvsm.vllm.pool_identity import engine_facts, model_facts
from kvsm.vllm.prompt_layout import block_layout, prompt_digest
from kvsm.vllm.versions import TESTED, installed

OPTIONS = ConnectorOptions(cpu_bytes_to_use=1 << 20)
KV_CACHE = make_kv_cache_config(34, (0, 8))

OTHER_VALUES: dict[str, Any] = {
    "CacheConfig.prefix_caching_hash_algo": "sha256_cbor",
    "SpeculativeConfig.method": "mtp",
}
"""Where not any other value will do."""


@cache
def full_config() -> Any:
    """A configuration in which every sub-configuration is present whose fields count."""
    transfer = KVTransferConfig(
        kv_connector="KvsmConnector", kv_connector_module_path="kvsm.vllm", kv_role="kv_both"
    )
    config = make_config(transfer, device_blocks=34, step_tokens=16, most_running=4)
    filled = _filled(config)
    filled.speculative_config.method = "eagle"
    return filled


def _filled(config: Any) -> Any:
    """Return a copy in which each missing sub-configuration is made of defaults."""
    config = copy.copy(config)
    hints = typing.get_type_hints(type(config), include_extras=False)
    for field in dataclasses.fields(config):
        if row_of(config, field) in EXCEPTIONS:
            continue
        value = getattr(config, field.name)
        if value is None:
            kinds = [kind for kind in _kinds_in(hints[field.name]) if is_config_class(kind)]
            value = _made_of_defaults(kinds[0]) if kinds else None
        setattr(config, field.name, _filled(value) if is_config(value) else value)
    return config


def is_config_class(kind: Any) -> bool:
    return (
        isinstance(kind, type)
        and kind.__module__.startswith("vllm.config")
        and dataclasses.is_dataclass(kind)
    )


def _kinds_in(hint: Any) -> Iterator[Any]:
    """Return the types in a type hint."""
    yield hint
    for part in typing.get_args(hint):
        yield from _kinds_in(part)


def _made_of_defaults(kind: Any) -> Any:
    """Make an object of this class without its checks: some classes refuse their own defaults."""
    made = object.__new__(kind)
    for field in dataclasses.fields(kind):
        default = default_of(field)
        object.__setattr__(made, field.name, None if default is dataclasses.MISSING else default)
    return made


def row_of(config: Any, field: dataclasses.Field[Any]) -> str:
    return f"{type(config).__name__}.{field.name}"


Replace = Callable[[Any], Any]
"""The whole configuration with another sub-configuration in this place."""


def walk(config: Any, replace: Replace) -> Iterator[tuple[Any, Replace]]:
    """This configuration and those below it whose fields count."""
    yield config, replace
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if is_config(value) and row_of(config, field) not in EXCEPTIONS:
            name = field.name
            yield from walk(
                value,
                lambda other, name=name: replace(changed(config, **{name: other})),  # type: ignore[misc]
            )


def another(value: Any, row: str) -> Any:
    """Return a value that differs from this one."""
    if row in OTHER_VALUES:
        return OTHER_VALUES[row]
    if isinstance(value, bool):
        return not value
    if isinstance(value, Enum):
        return next((one for one in type(value) if one is not value), "another")
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, dict):
        return {**value, "another": 1}
    if isinstance(value, list | tuple):
        return [*value, "another"]
    if isinstance(value, set | frozenset):
        return {*value, "another"}
    if hasattr(value, "to_dict"):
        other = copy.deepcopy(value)
        other.rope_theta = 12345.0
        return other
    return "another"


@cache
def configs() -> list[tuple[Any, Replace]]:
    """Each configuration whose fields count, and how to put another one into its place."""
    return list(walk(full_config(), lambda whole: whole))


def test_each_field_of_vllms_configuration_changes_the_identity_or_is_an_exception() -> None:
    """A field with a row in `EXCEPTIONS` must not change the identity: else the row would be wrong."""
    whole = full_config()
    identity, layout = engine_facts(whole, KV_CACHE, OPTIONS), block_layout(whole, KV_CACHE, 1)
    wrong = []
    for config, replace in configs():
        for field in dataclasses.fields(config):
            row, value = row_of(config, field), getattr(config, field.name)
            is_walked = is_config(value) and row not in EXCEPTIONS
            if is_walked and default_of(field) is not None:
                continue  # It is always there, and its fields have their own turns.
            other = None if is_walked else another(value, row)
            different = replace(changed(config, **{field.name: other}))
            counts = engine_facts(different, KV_CACHE, OPTIONS) != identity
            between = block_layout(different, KV_CACHE, 1) != layout
            if counts == (row in EXCEPTIONS) or between == (row in {**EXCEPTIONS, **BETWEEN_ENGINES}):
                wrong.append(f"{row} = {other!r}: of a pool: {counts}, between engines: {between}")
    assert wrong == []


def test_a_new_vllm_has_no_field_that_is_not_decided() -> None:
    """A new field counts. Decide whether it should: add it to `COUNTED`, or give it a row with a reason in
    kvsm/vllm/config_exceptions.py."""
    there = {row_of(config, field) for config, _ in configs() for field in dataclasses.fields(config)}
    counted = {f"{name}.{field}" for name, fields in COUNTED.items() for field in fields.split()}
    assert sorted(there - counted - EXCEPTIONS.keys()) == []
    assert sorted(counted & EXCEPTIONS.keys()) == []
    if installed().split("+")[0] == TESTED[-1]:
        assert sorted((counted | EXCEPTIONS.keys() | BETWEEN_ENGINES.keys()) - there) == []
    assert BETWEEN_ENGINES.keys() <= counted


OTHER_OPTIONS: dict[str, dict[str, Any]] = {
    "what a block holds": {"blocks_per_chunk": 2, "canonical_layout": True},
    "how much, and where": {
        "cpu_bytes_to_use": 1 << 21,
        "cpu_bytes_to_use_per_rank": 1 << 20,
        "pool_dir": "/dev/shm/a",
        "disk_dir": "/a",
        "disk_bytes": 1 << 20,
        "file_group": 0,
    },
    "which blocks are stored and loaded, and when": {
        "policy": "arc",
        "store_threshold": 2,
        "store": "lazy",
        "load_only_if_faster": True,
        "prompt_only": True,
        "lazy_target_blocks": 2,
        "disk_write": "back",
        "disk_flush": "none",
        "agent_hint_share": 0.5,
    },
    "how copies are made, watched and logged": {
        "verify_copies": True,
        "event_log": "/a",
        "log_on_failure": "stop",
        "log_durability": "none",
        "log_max_bytes": 1 << 20,
        "past_logs_max_bytes": 1 << 20,
        "transfer_timeout_s": 1.0,
        "last_step": "flush",
    },
    "other engines and other lives": {
        "hand_over_directory": "/dev/shm/a",
        "hand_over_timeout_s": 1.0,
        "hand_over_share": 0.25,
        "weights_version": "v2",
    },
}
"""What an option decides -> another value of each such option of kvsm. Only the first group changes bytes."""


def test_each_option_of_kvsm_that_decides_what_a_block_holds_changes_the_identity() -> None:
    config = full_config()
    identity = engine_facts(config, KV_CACHE, OPTIONS)
    assert {name for group in OTHER_OPTIONS.values() for name in group} == set(
        ConnectorOptions.__struct_fields__
    )
    for decides, values in OTHER_OPTIONS.items():
        for name, value in values.items():
            other = copy.copy(OPTIONS)
            msgspec.structs.force_setattr(other, name, value)
            counts = engine_facts(config, KV_CACHE, other) != identity
            assert counts == (decides == "what a block holds"), name


def test_layers_and_their_groups_change_the_identity() -> None:
    config = full_config()
    identity, layout = engine_facts(config, KV_CACHE, OPTIONS), block_layout(config, KV_CACHE, 1)
    first, second = KV_CACHE.kv_cache_groups
    for groups in (
        [first],
        [second, first],
        [first, dataclasses.replace(second, layer_names=["layer.7"])],
        [dataclasses.replace(first, kv_cache_spec=second.kv_cache_spec), second],
    ):
        other = changed(KV_CACHE, kv_cache_groups=groups)
        assert engine_facts(config, other, OPTIONS) != identity
        assert block_layout(config, other, 1) != layout


@pytest.mark.parametrize("method", ["ngram", "ngram_gpu", "suffix"])
def test_drafts_without_a_model_change_nothing(method: str) -> None:
    """A decode engine may draft where its prefill engine does not."""
    config = full_config()
    without = changed(config, speculative_config=None)
    speculative = changed(config.speculative_config, method=method)
    assert model_facts(changed(config, speculative_config=speculative), KV_CACHE) == model_facts(
        without, KV_CACHE
    )


def test_a_pool_and_a_disk_have_room_for_every_field() -> None:
    """With all sub-configurations there, and a hundred layers in each group."""
    groups = [
        dataclasses.replace(group, layer_names=[f"model.layers.{n}.self_attn.attn" for n in range(100)])
        for group in KV_CACHE.kv_cache_groups
    ]
    facts = engine_facts(full_config(), changed(KV_CACHE, kv_cache_groups=groups), OPTIONS)
    identity = PoolIdentity.of({**facts, **{f"layout {n}": "x" * 200 for n in range(4)}})
    check_kept(KeptPool(identity, "a run"))
    assert sum(len(name) + len(value) for name, value in identity.facts) < SUPERBLOCK_BYTES // 2


_OTHER_PROCESS = """
import json
from test_identity import KV_CACHE, full_config, model_facts
config = full_config()
config.model_config.model = config.model_config.hf_config._name_or_path = "a model"
print(json.dumps(model_facts(config, KV_CACHE)))
"""


def test_two_starts_have_equal_facts() -> None:
    """No fact depends on the address of an object, or on the order of a set."""
    starts = []
    for seed in ("1", "2"):
        path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
        command = [sys.executable, "-c", _OTHER_PROCESS]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        starts.append(json.loads(run.stdout.splitlines()[-1]))
    assert starts[0] == starts[1]
    assert "model_config.hf_config" in starts[0]


class _Quantization:
    def __init__(self, bits: int) -> None:
        self.bits, self.whole = bits, self


def _override(config: object, theta: float) -> object:
    raise NotImplementedError((config, theta))


@pytest.mark.parametrize(
    ("one", "same", "other"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 1, "b": 3}),
        ({"a", "b"}, {"b", "a"}, {"a"}),
        (_Quantization(4), _Quantization(4), _Quantization(8)),
        (partial(_override, theta=1.0), partial(_override, theta=1.0), partial(_override, theta=2.0)),
        (_override, _override, _Quantization),
        (torch.float16, torch.float16, torch.bfloat16),
        (None, None, "None"),
        ([1, 2], (1, 2), [2, 1]),
        ("x" * 200 + "y", "x" * 200 + "y", "x" * 200 + "z"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_equal_values_and_only_these_have_one_text(one: object, same: object, other: object) -> None:
    assert plain(one) == plain(same)
    assert short(one) == short(same)
    assert short(one) != short(other)
    assert "0x" not in plain(one)
    assert len(short(one)) <= MOST_CHARACTERS


class Watched:
    """An object whose attributes are noted when they are read: `lora_request.lora_name`."""

    def __init__(self, inner: Any, path: str, read: set[str]) -> None:
        self._inner, self._path, self._read = inner, path, read

    def __getattr__(self, name: str) -> Any:
        return self._watched(getattr(self._inner, name), f"{self._path}{name}")

    def _watched(self, value: Any, path: str) -> Any:
        if isinstance(value, list):
            return [self._watched(one, path) for one in value]
        if isinstance(value, SimpleNamespace):
            return Watched(value, f"{path}.", self._read)
        self._read.add(path)
        return value


def a_request() -> Any:
    """Return a request with every input that changes block hashes."""
    position = SimpleNamespace(offset=1, length=3)
    return SimpleNamespace(
        all_token_ids=[7] * 12,
        lora_request=SimpleNamespace(lora_name="tenant", lora_path="/adapters/a"),
        mm_features=[SimpleNamespace(identifier="an image", mm_position=position)],
        cache_salt="a salt",
        prompt_embeds=torch.zeros(12, 2),
        _prompt_embeds_per_block_hashes={},
    )


def _other_embeddings(request: Any) -> None:
    request.prompt_embeds = torch.ones(12, 2)


def _set(path: str, value: object) -> Callable[[Any], None]:
    def change(request: Any) -> None:
        *way, last = path.split(".")
        for name in way:
            request = getattr(request, name)
            request = request[0] if isinstance(request, list) else request
        setattr(request, last, value)

    return change


EXTRA_KEYS: dict[str, Callable[[Any], None]] = {
    "lora_request.lora_name": _set("lora_request.lora_name", "another"),
    "lora_request.lora_path": _set("lora_request.lora_path", "/adapters/b"),
    "mm_features.identifier": _set("mm_features.identifier", "another image"),
    "mm_features.mm_position.offset": _set("mm_features.mm_position.offset", 2),
    "cache_salt": _set("cache_salt", "another salt"),
    "prompt_embeds": _other_embeddings,
}
"""What vLLM reads of a request to make the extra keys of its block hashes -> another request."""

READ_BESIDE = {
    "mm_features.mm_position.length": "says which blocks hold the image, whose content decides its length",
    "_prompt_embeds_per_block_hashes": "a cache",
}


def test_vllm_reads_nothing_else_for_the_extra_keys_of_a_hash() -> None:
    read: set[str] = set()
    generate_block_hash_extra_keys(typing.cast(Any, Watched(a_request(), "", read)), 0, 12, 0)
    assert read == EXTRA_KEYS.keys() | READ_BESIDE.keys()


@pytest.mark.parametrize("path", EXTRA_KEYS)
def test_each_extra_key_of_a_block_hash_changes_the_digest_of_a_hand_over(path: str) -> None:
    one, other = a_request(), a_request()
    assert prompt_digest(one, 12, "v1") == prompt_digest(other, 12, "v1")
    EXTRA_KEYS[path](other)
    other._prompt_embeds_per_block_hashes.clear()
    assert prompt_digest(one, 12, "v1") != prompt_digest(other, 12, "v1")


def test_tokens_and_weights_change_the_digest_of_a_hand_over() -> None:
    one, other = a_request(), a_request()
    other.all_token_ids[11] = 8
    assert prompt_digest(one, 11, "v1") == prompt_digest(other, 11, "v1")
    assert prompt_digest(one, 12, "v1") != prompt_digest(other, 12, "v1")
    assert prompt_digest(one, 12, "v1") != prompt_digest(one, 12, "v2")
