"""Hand-overs in vLLM: the threads that talk to other engines, by the options and the role of this engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from vllm.logger import init_logger

from kvsm.core.offloader import Offloader
from kvsm.core.scheduler import SchedulerConfig
from kvsm.errors import UnusableFiles
from kvsm.tiers.hand_over.claiming import Claims
from kvsm.tiers.hand_over.incoming import IncomingHandOvers
from kvsm.tiers.hand_over.leases import LeaseTable
from kvsm.tiers.hand_over.outgoing import OutgoingHandOvers
from kvsm.tiers.hand_over.peer_messages import hand_over_directory
from kvsm.tiers.hand_over.service import HandOverService
from kvsm.vllm.extra_config import ConnectorOptions
from kvsm.vllm.pool_identity import weights_version
from kvsm.vllm.prompt_layout import block_layout, prompt_digest

log = init_logger("vllm.kvsm")


class HandOvers(NamedTuple):
    """The parts of an engine for hand-overs. A part is None if options or role exclude it, or if its files
    cannot be used.

    outgoing: hand-overs to other engines.
    incoming: hand-overs from other engines.
    service: the thread that answers engines that read from this one.
    serves_without: whether the directory or the socket cannot be used.
    """

    outgoing: OutgoingHandOvers | None = None
    incoming: IncomingHandOvers | None = None
    service: HandOverService | None = None
    serves_without: bool = False


def usable_directory(options: ConnectorOptions) -> Path | str | None:
    """Return the directory for hand-overs, or why it cannot be used; None if the options name none."""
    try:
        return hand_over_directory(options.hand_over_directory)
    except UnusableFiles as error:
        return str(error)


def hand_overs(
    options: ConnectorOptions,
    vllm_config: Any,
    kv_cache_config: Any,
    core: Offloader,
    config: SchedulerConfig,
) -> HandOvers:
    """Make the parts for hand-overs. If directory or socket cannot be used, the engine serves without
    hand-overs, and one warning says why. Raises `ConfigError` if another engine has this engine's id, or the
    path is too long."""
    directory = usable_directory(options)
    if directory is None:
        return HandOvers()
    if isinstance(directory, str):
        _warn(directory)
        return HandOvers(serves_without=True)
    transfer, timeout_s = vllm_config.kv_transfer_config, options.hand_over_timeout_s
    layout = block_layout(vllm_config, kv_cache_config, options.blocks_per_chunk)
    first_weights = weights_version(vllm_config, options.weights_version)

    def digest(request: Any, num_tokens: int) -> bytes:
        return prompt_digest(request, num_tokens, core.ledger.weights or first_weights)

    outgoing = incoming = service = None
    serves_without = False
    if transfer.is_kv_producer:
        leases = LeaseTable(timeout_s)
        try:
            service = HandOverService(directory, transfer.engine_id, leases, layout)
            outgoing = OutgoingHandOvers(
                core, config, transfer.engine_id, leases, digest, log, options.hand_over_share
            )
        except UnusableFiles as error:
            serves_without = True
            _warn(str(error))
    if transfer.is_kv_consumer:
        claims = Claims(directory, timeout_s)
        incoming = IncomingHandOvers(core, config, claims, layout, digest, log)
    return HandOvers(outgoing, incoming, service, serves_without)


def _warn(why: str) -> None:
    log.warning(
        "kvsm: the engine serves without hand-overs (hand_over_directory): %s. They are tried again when the "
        "engine restarts",
        why,
    )
