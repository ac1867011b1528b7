"""The structs that commands print with `--json`, by the value of their key "schema".

Within a version, a schema only gains fields. Removing a field or changing its meaning makes a new version.
`specs/write_docs.py` writes the schemas to docs/schemas/. No command imports this file, because it imports
all commands.
"""

from __future__ import annotations

from kvsm.cli.any_size import AnySizeAnswer
from kvsm.cli.check import CheckAnswer, ListedModel
from kvsm.cli.conform_result import ConformAnswer
from kvsm.cli.copy_paths import CopyPathsAnswer
from kvsm.cli.export import ExportAnswer, RedactAnswer
from kvsm.cli.fork import ForkAnswer
from kvsm.cli.fuzz import FuzzAnswer, FuzzReplayAnswer
from kvsm.cli.logs import LogsAnswer
from kvsm.cli.museum import ListedExhibit, MuseumAnswer
from kvsm.cli.pools import PoolsAnswer
from kvsm.cli.query import ListedQuery, QueryAnswer
from kvsm.cli.replay import ReplayAnswer
from kvsm.cli.repro import ReproAnswer
from kvsm.cli.show import ShowAnswer
from kvsm.cli.spans import SpansAnswer
from kvsm.cli.tail import TailAnswer
from kvsm.cli.timeline import TimelineAnswer
from kvsm.cli.verify import VerifyAnswer
from kvsm.cli.vllm import VllmCheckAnswer
from kvsm.cli.vllm_fuzz import VllmFuzzAnswer
from kvsm.cli.whatif import WhatIfAnswer
from kvsm.cli.why import WhyAnswer
from kvsm.explain.live_view import LiveState
from kvsm.explain.report.log_report import Report
from kvsm.explain.two_logs import LogDiff
from kvsm.explain.verify.unavoidable import Unavoidable
from kvsm.serving.workload_run import RunResult
from kvsm.vllm.bench import Comparison

SCHEMAS: dict[str, type] = {
    "kvsm.run/1": RunResult,
    "kvsm.logs/1": LogsAnswer,
    "kvsm.pools/1": PoolsAnswer,
    "kvsm.copy-paths/1": CopyPathsAnswer,
    "kvsm.report/1": Report,
    "kvsm.replay/1": ReplayAnswer,
    "kvsm.verify/1": VerifyAnswer,
    "kvsm.show/1": ShowAnswer,
    "kvsm.query/1": QueryAnswer,
    "kvsm.query-list/1": ListedQuery,
    "kvsm.spans/1": SpansAnswer,
    "kvsm.export/1": ExportAnswer,
    "kvsm.redact/1": RedactAnswer,
    "kvsm.tail/1": TailAnswer,
    "kvsm.top/1": LiveState,
    "kvsm.repro/1": ReproAnswer,
    "kvsm.diff/1": LogDiff,
    "kvsm.fork/1": ForkAnswer,
    "kvsm.unavoidable/1": Unavoidable,
    "kvsm.timeline/1": TimelineAnswer,
    "kvsm.whatif/1": WhatIfAnswer,
    "kvsm.why/1": WhyAnswer,
    "kvsm.check/1": CheckAnswer,
    "kvsm.check-list/1": ListedModel,
    "kvsm.any-size/1": AnySizeAnswer,
    "kvsm.fuzz/1": FuzzAnswer,
    "kvsm.fuzz-replay/1": FuzzReplayAnswer,
    "kvsm.museum/1": MuseumAnswer,
    "kvsm.museum-list/1": ListedExhibit,
    "kvsm.vllm-check/1": VllmCheckAnswer,
    "kvsm.vllm-fuzz/1": VllmFuzzAnswer,
    "kvsm.conform/1": ConformAnswer,
    "kvsm.bench-vllm/1": Comparison,
}
"""Each struct by its tag: `class ReplayAnswer(msgspec.Struct, tag_field="schema", tag="kvsm.replay/1")`."""
