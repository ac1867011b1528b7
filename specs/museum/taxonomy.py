"""The museum in the taxonomy of "A First Look at Bugs in LLM Inference Engines" (arXiv 2506.09713, 2025).

The study sorts 929 bugs of llama.cpp, vLLM, DeepSpeed, MLC-LLM and TensorRT-LLM by six symptoms and 28 root
causes. The mapping of the exhibits is kvsm's own: one person sorted them by their stories, and no author of
the study has seen it.

- A symptom is what users of the other system saw, as the story says. If the story names no effect that a user
  sees, it is a silent error: the state is wrong, and nothing reports it.
- A cause is one of the study's root causes. Wrong counts, pins, keys and evictions are incorrect cache
  management. An access to memory that another copy, kernel or process may still use counts as missing
  synchronization.

The study's names and counts were taken from its abstract and from public notes on its second version, because
its full text was not at hand. The notes' five classes of root causes have 1,053 instances together, and not
the 1,041 that the notes state. So only the counts of symptoms are used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple


class Symptom(Enum):
    """The six symptoms of the study."""

    CRASH = "crash"
    UNEXPECTED_OUTPUT = "unexpected output"
    FEATURE_FAILURE = "feature failure"
    ABNORMAL_PERFORMANCE = "abnormal performance"
    HANG = "hang"
    SILENT_ERROR = "silent error"


class Cause(Enum):
    """The root causes of the study that exhibits have, each with its class."""

    ALGORITHM = "functionality: incorrect algorithm implementation"
    SYNCHRONIZATION = "functionality: synchronization"
    EXCEPTION_HANDLING = "functionality: exception handling"
    CONDITIONAL_LOGIC = "functionality: conditional logic"
    ASSIGNMENT = "functionality: incorrect assignment"
    CACHE_MANAGEMENT = "resource: incorrect cache management"
    INCOMPATIBLE_MODEL = "configuration: incompatible model"


STUDY_BUGS = 929
STUDY_SYMPTOMS: Mapping[Symptom, int] = {
    Symptom.CRASH: 603,
    Symptom.UNEXPECTED_OUTPUT: 122,
    Symptom.FEATURE_FAILURE: 107,
    Symptom.ABNORMAL_PERFORMANCE: 53,
    Symptom.HANG: 35,
    Symptom.SILENT_ERROR: 12,
}
"""Symptom -> the number of bugs in the study. A bug may have two symptoms."""


class Place(NamedTuple):
    """The place of an exhibit in the taxonomy."""

    symptom: Symptom
    cause: Cause


_CRASH, _OUTPUT, _FEATURE = Symptom.CRASH, Symptom.UNEXPECTED_OUTPUT, Symptom.FEATURE_FAILURE
_SLOW, _HANG, _SILENT = Symptom.ABNORMAL_PERFORMANCE, Symptom.HANG, Symptom.SILENT_ERROR

TAXONOMY: Mapping[str, Place] = {
    "B01": Place(_SLOW, Cause.CACHE_MANAGEMENT),
    "B02": Place(_OUTPUT, Cause.SYNCHRONIZATION),
    "B03": Place(_OUTPUT, Cause.SYNCHRONIZATION),
    "B04": Place(_OUTPUT, Cause.SYNCHRONIZATION),
    "B05": Place(_OUTPUT, Cause.SYNCHRONIZATION),
    "B06": Place(_FEATURE, Cause.CACHE_MANAGEMENT),
    "B07": Place(_SILENT, Cause.CACHE_MANAGEMENT),
    "B08": Place(_SLOW, Cause.CONDITIONAL_LOGIC),
    "B09": Place(_SLOW, Cause.CACHE_MANAGEMENT),
    "B10": Place(_SILENT, Cause.CACHE_MANAGEMENT),
    "B11": Place(_SILENT, Cause.CACHE_MANAGEMENT),
    "B12": Place(_OUTPUT, Cause.ALGORITHM),
    "B13": Place(_OUTPUT, Cause.SYNCHRONIZATION),
    "B14": Place(_OUTPUT, Cause.SYNCHRONIZATION),
    "B15": Place(_HANG, Cause.ALGORITHM),
    "B16": Place(_OUTPUT, Cause.ALGORITHM),
    "B17": Place(_OUTPUT, Cause.CONDITIONAL_LOGIC),
    "B18": Place(_CRASH, Cause.ALGORITHM),
    "B19": Place(_CRASH, Cause.CONDITIONAL_LOGIC),
    "B20": Place(_CRASH, Cause.ALGORITHM),
    "B21": Place(_SILENT, Cause.CONDITIONAL_LOGIC),
    "B22": Place(_HANG, Cause.SYNCHRONIZATION),
    "B23": Place(_FEATURE, Cause.ALGORITHM),
    "B24": Place(_FEATURE, Cause.ALGORITHM),
    "B25": Place(_HANG, Cause.EXCEPTION_HANDLING),
    "B26": Place(_FEATURE, Cause.ALGORITHM),
    "B27": Place(_OUTPUT, Cause.EXCEPTION_HANDLING),
    "B28": Place(_OUTPUT, Cause.EXCEPTION_HANDLING),
    "B29": Place(_SILENT, Cause.CACHE_MANAGEMENT),
    "B30": Place(_CRASH, Cause.CONDITIONAL_LOGIC),
    "B31": Place(_SILENT, Cause.CACHE_MANAGEMENT),
    "B32": Place(_SILENT, Cause.CACHE_MANAGEMENT),
    "B33": Place(_OUTPUT, Cause.EXCEPTION_HANDLING),
    "B34": Place(_OUTPUT, Cause.SYNCHRONIZATION),
    "B35": Place(_OUTPUT, Cause.SYNCHRONIZATION),
    "B36": Place(_OUTPUT, Cause.SYNCHRONIZATION),
    "B37": Place(_OUTPUT, Cause.SYNCHRONIZATION),
    "B38": Place(_OUTPUT, Cause.SYNCHRONIZATION),
    "B39": Place(_OUTPUT, Cause.ALGORITHM),
    "B40": Place(_SILENT, Cause.EXCEPTION_HANDLING),
    "B41": Place(_SLOW, Cause.CACHE_MANAGEMENT),
    "B42": Place(_SILENT, Cause.CACHE_MANAGEMENT),
    "B43": Place(_OUTPUT, Cause.CACHE_MANAGEMENT),
    "B44": Place(_SILENT, Cause.CACHE_MANAGEMENT),
    "B45": Place(_OUTPUT, Cause.SYNCHRONIZATION),
    "B46": Place(_FEATURE, Cause.ALGORITHM),
    "B47": Place(_HANG, Cause.CONDITIONAL_LOGIC),
    "B48": Place(_OUTPUT, Cause.CACHE_MANAGEMENT),
    "B49": Place(_OUTPUT, Cause.CACHE_MANAGEMENT),
    "B50": Place(_OUTPUT, Cause.CACHE_MANAGEMENT),
    "B51": Place(_OUTPUT, Cause.CACHE_MANAGEMENT),
    "B52": Place(_OUTPUT, Cause.CONDITIONAL_LOGIC),
    "B53": Place(_OUTPUT, Cause.EXCEPTION_HANDLING),
    "B54": Place(_SILENT, Cause.CONDITIONAL_LOGIC),
    "B55": Place(_HANG, Cause.EXCEPTION_HANDLING),
    "B56": Place(_SILENT, Cause.CACHE_MANAGEMENT),
    "B57": Place(_OUTPUT, Cause.ASSIGNMENT),
    "B58": Place(_OUTPUT, Cause.CACHE_MANAGEMENT),
    "B59": Place(_OUTPUT, Cause.CONDITIONAL_LOGIC),
    "B60": Place(_FEATURE, Cause.CACHE_MANAGEMENT),
    "B61": Place(_FEATURE, Cause.SYNCHRONIZATION),
    "B62": Place(_OUTPUT, Cause.CACHE_MANAGEMENT),
    "B63": Place(_CRASH, Cause.CONDITIONAL_LOGIC),
    "B64": Place(_CRASH, Cause.CONDITIONAL_LOGIC),
    "B65": Place(_OUTPUT, Cause.SYNCHRONIZATION),
    "B66": Place(_OUTPUT, Cause.CACHE_MANAGEMENT),
    "B67": Place(_CRASH, Cause.INCOMPATIBLE_MODEL),
    "B68": Place(_OUTPUT, Cause.CACHE_MANAGEMENT),
    "B69": Place(_FEATURE, Cause.ALGORITHM),
    "B70": Place(_SLOW, Cause.CONDITIONAL_LOGIC),
    "B71": Place(_HANG, Cause.CACHE_MANAGEMENT),
    "B72": Place(_FEATURE, Cause.ALGORITHM),
}
"""Exhibit -> its place."""


def symptoms() -> Counter[Symptom]:
    """Return the number of exhibits with each symptom."""
    return Counter(place.symptom for place in TAXONOMY.values())


def symptoms_table() -> str:
    """Return a Markdown table of symptoms, in the study and in the museum."""
    ours, of_study = symptoms(), sum(STUDY_SYMPTOMS.values())
    rows = [
        f"| {one.value} | {STUDY_SYMPTOMS[one]} ({STUDY_SYMPTOMS[one] / of_study:.0%}) "
        f"| {ours[one]} ({ours[one] / ours.total():.0%}) |\n"
        for one in Symptom
    ]
    total = f"| all | {of_study} | {ours.total()} |\n"
    return "".join(["| symptom | the study | the museum |\n| --- | --: | --: |\n", *rows, total])


def causes_table() -> str:
    """Return a Markdown table of root causes and the exhibits that have them."""
    ids: dict[Cause, list[str]] = {cause: [] for cause in Cause}
    for id, place in TAXONOMY.items():
        ids[place.cause].append(id)
    ordered = sorted(ids.items(), key=lambda row: -len(row[1]))
    rows = [f"| {cause.value} | {len(those)} | {', '.join(those)} |\n" for cause, those in ordered]
    return "".join(["| root cause | exhibits | which |\n| --- | --: | --- |\n", *rows])
