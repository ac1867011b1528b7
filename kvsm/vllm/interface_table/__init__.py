"""What vLLM calls, and what kvsm does with each call: a table of docs/vllm.md.

`interface` compares it with the installed vLLM. A method that a new vLLM adds, removes or changes fails a
test until it has its row here. `vllm_options` has the options.

`connector_interfaces` has what vLLM calls on `KvsmConnector`, `spec_interfaces` what it calls on `KvsmSpec`,
`records` what it passes to both. `rows` says what a row means.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvsm.vllm.interface_table.connector_interfaces import CONNECTOR_INTERFACES
from kvsm.vllm.interface_table.interface_records import RECORDS
from kvsm.vllm.interface_table.rows import PROPERTY, Interface, Method, Record
from kvsm.vllm.interface_table.spec_interfaces import SPEC_INTERFACES

__all__ = ["INTERFACES", "PROPERTY", "RECORDS", "Interface", "Method", "Record"]

INTERFACES: Mapping[str, Interface] = {**CONNECTOR_INTERFACES, **SPEC_INTERFACES}
"""A class of vLLM -> what kvsm does with its methods."""
