"""The options that vLLM's own offload connectors read, and what kvsm does with each: a table of docs/vllm.md.

`interface` compares it with the sources of the installed vLLM. If a new vLLM reads another option, a test
fails until the option has a row here.
"""

from __future__ import annotations

from typing import NamedTuple

_OPTIONS = "test_interface.py::test_options_are_taken_or_refused_as_the_table_says"


class Option(NamedTuple):
    """An option that one of vLLM's own offload connectors reads from `kv_connector_extra_config`.

    readers: the connectors or specs of vLLM that read it.
    connector: whether KvsmConnector has it.
    why: what it means, or why kvsm needs no such option. It does not describe the options in `instead`.
    instead: the options of KvsmConnector to use instead. The error for a refused option prints their
        descriptions.
    since: the version that added it; empty if every tested version has it.
    """

    name: str
    readers: str
    connector: bool
    why: str = ""
    test: str = _OPTIONS
    since: str = ""
    instead: tuple[str, ...] = ()

    @property
    def answer(self) -> str:
        """Return the cell of a table that describes this option."""
        use = f"Use {' and '.join(f'`{name}`' for name in self.instead)}." if self.instead else ""
        return " ".join(filter(None, (use, self.why)))


_TIERS = "TieringOffloadingSpec"
_SIMPLE = "SimpleCPUOffloadConnector"

OPTIONS: tuple[Option, ...] = (
    Option(
        "spec_name",
        "OffloadingConnector",
        False,
        "KvsmConnector has no spec.",
    ),
    Option("spec_module_path", "OffloadingConnector", False, "KvsmConnector has no spec."),
    Option(
        "block_size",
        "OffloadingConnector",
        False,
        "vLLM's size is in tokens, kvsm's is in device blocks.",
        instead=("blocks_per_chunk",),
    ),
    Option(
        "blocks_per_chunk",
        "OffloadingConnector",
        True,
        "Device blocks under one key.",
        "test_tokens.py::test_tokens_are_those_without_offload",
    ),
    Option(
        "offload_prompt_only",
        "OffloadingConnector",
        False,
        instead=("prompt_only",),
    ),
    Option(
        "self_describing_kv_events",
        "OffloadingConnector",
        False,
        "The KV events of KvsmConnector always include the tokens of a block.",
        "test_event_log.py::test_described_kv_events_say_the_tokens",
    ),
    Option(
        "canonical_layout",
        "OffloadingConnector",
        True,
        "Whether a block has the same bytes on the host for every number of ranks.",
        "test_replicated_kv.py::test_ranks_share_a_host_pool[canonical]",
    ),
    Option(
        "sync_load_budget_bytes",
        "OffloadingConnector",
        False,
        "vLLM's step waits for loads up to this size. With kvsm, other requests compute meanwhile.",
        since="0.33.0",
    ),
    Option(
        "cpu_bytes_to_use",
        "CPUOffloadingSpec, SimpleCPUOffloadConnector",
        True,
        "Host memory of all ranks together.",
        "test_vllm_options.py::test_host_memory_is_divided_over_ranks_and_chunks",
    ),
    Option("eviction_policy", "CPUOffloadingSpec", False, instead=("policy",)),
    Option("cache_policy_module_path", "CPUOffloadingSpec", False, instead=("policy",)),
    Option(
        "store_threshold",
        "CPUOffloadingSpec",
        True,
        "How often a block must be offered before it is stored.",
        "test_scheduler_storing.py::test_store_policy_threshold_stores_at_the_nth_offer",
    ),
    Option(
        "max_tracker_size",
        "CPUOffloadingSpec",
        False,
        "kvsm limits by itself for how many keys it counts offers.",
    ),
    Option("secondary_tiers", _TIERS, False, instead=("disk_dir", "disk_bytes")),
    Option("backpressure", _TIERS, False, "No request waits for a store to the disk tier."),
    Option("tier_poll_interval_s", _TIERS, False, "Copies are polled in each step.", since="0.33.0"),
    Option("enable_telemetry", f"a tier of {_TIERS}", False, "The metrics of all tiers are always on."),
    Option("lazy_offload", _SIMPLE, False, instead=("store",)),
    Option(
        "cpu_bytes_to_use_per_rank",
        _SIMPLE,
        True,
        "Host memory of each rank.",
        "test_vllm_options.py::test_bytes_per_rank_are_as_many_as_bytes_of_all_ranks",
    ),
    Option(
        "num_cpu_blocks",
        _SIMPLE,
        False,
        "In kvsm, all pipeline stages have the same number of host blocks.",
        since="0.33.0",
        instead=("cpu_bytes_to_use_per_rank",),
    ),
    Option("kv_offload_backend", _SIMPLE, False, instead=("disk_dir", "disk_bytes")),
    Option("disk_path", _SIMPLE, False, instead=("disk_dir",)),
    Option("disk_capacity_bytes", _SIMPLE, False, instead=("disk_bytes",)),
    Option("disk_buffer_slots", _SIMPLE, False, "kvsm sizes the buffers of its disk tier by itself."),
    Option("use_page_cache", _SIMPLE, False, "A file system that grants direct I/O is used with it."),
)

OPTION_READERS = (
    "v1/kv_offload",
    "v1/simple_kv_offload",
    "distributed/kv_transfer/kv_connector/v1/offloading",
    "distributed/kv_transfer/kv_connector/v1/offloading_connector.py",
    "distributed/kv_transfer/kv_connector/v1/simple_cpu_offload_connector.py",
)
"""The files and directories of vLLM that read the options above."""
