"""Replace the parts of SGLang's cache that need a GPU.

==============================================  ================================================
needs a GPU, or is not installed                replacement
==============================================  ================================================
torchvision (imported for images, not used)     an empty module
streams and events of the device                `simulated_streams`
sgl_kernel.kvcacheio.transfer_kv_direct         a copy in the current stream
cudaHostRegister of a host pool                 nothing
==============================================  ================================================

The tree, the allocator, the controller and both pools are SGLang's own, unchanged.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any
from unittest.mock import MagicMock

from sglang_tree.simulated_streams import MODULE, Stream

_TORCHVISION = ("", ".io", ".transforms", ".transforms.functional")


def prepare() -> None:
    """Make SGLang's cache importable, for the rest of the process."""
    logging.disable(logging.WARNING)
    # Ask before the stand-ins exist: Transformers caches the answer, and would import parts that they lack.
    if not import_module("transformers.utils.import_utils").is_torchvision_available():
        for name in _TORCHVISION:
            sys.modules[f"torchvision{name}"] = MagicMock(__spec__=None)
    utils: Any = import_module("sglang.srt.utils")
    utils.get_device_module = lambda *_: MODULE
    pools: Any = import_module("sglang.srt.mem_cache.pool_host.mha")
    pools.transfer_kv_direct = _copy
    memory: Any = import_module("sglang.srt.mem_cache.pool_host.common")
    memory._cuda_host_register = lambda *_: None


def _copy(
    src_layers: Sequence[Any], dst_layers: Sequence[Any], src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    """Queue a copy of rows of tokens, from each layer of one pool to the same layer of the other pool."""

    def work() -> None:
        for source, target in zip(src_layers, dst_layers):
            target[dst_indices] = source[src_indices]

    del page_size  # indices count tokens
    Stream.current.add(work)
