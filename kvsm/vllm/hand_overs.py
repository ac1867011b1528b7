"""Hand-overs in vLLM: the threads that talk to other engines, for the options and the role of this one."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger

from kvsm.hand_over.claims import Claims
from kvsm.hand_over.leases import LeaseTable
from kvsm.hand_over.messages import hand_over_directory
from kvsm.hand_over.service import HandOverService
from kvsm.offloader import Offloader
from kvsm.scheduler import SchedulerConfig
from kvsm.scheduler.incoming import IncomingHandOvers
from kvsm.scheduler.outgoing import OutgoingHandOvers
from kvsm.vllm.extra_config import ConnectorOptions
from kvsm.vllm.pool_identity import weights_version
from kvsm.vllm.prompt_layout import block_layout, prompt_digest

log = init_logger("vllm.kvsm")


def hand_overs(
    options: ConnectorOptions,
    vllm_config: Any,
    kv_cache_config: Any,
    core: Offloader,
    config: SchedulerConfig,
) -> tuple[OutgoingHandOvers | None, IncomingHandOvers | None, HandOverService | None]:
    """The hand-overs that this engine gives and gets, and the thread that answers its readers. None for what
    its options and its role rule out. Raises `ConfigError` if it cannot have its socket."""
    directory = hand_over_directory(options.hand_over_directory)
    if directory is None:
        return None, None, None
    transfer, timeout_s = vllm_config.kv_transfer_config, options.hand_over_timeout_s
    layout = block_layout(vllm_config, kv_cache_config, options.blocks_per_chunk)
    first_weights = weights_version(vllm_config, options.weights_version)

    def digest(request: Any, num_tokens: int) -> bytes:
        return prompt_digest(request, num_tokens, core.ledger.weights or first_weights)

    outgoing = incoming = service = None
    if transfer.is_kv_producer:
        leases = LeaseTable(timeout_s)
        service = HandOverService(directory, transfer.engine_id, leases, layout)
        outgoing = OutgoingHandOvers(
            core, config, transfer.engine_id, leases, digest, log, options.hand_over_share
        )
    if transfer.is_kv_consumer:
        claims = Claims(directory, timeout_s)
        incoming = IncomingHandOvers(core, config, claims, layout, digest, log)
    return outgoing, incoming, service
