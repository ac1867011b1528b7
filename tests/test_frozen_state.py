"""A state that is copied in pieces is the state of the moment at which it was frozen, whatever was folded since."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from museum.drawn_worlds import audited_serving, audited_tiers

from kvsm import events as ev
from kvsm import native
from kvsm.events import OffloadConfig, OffloadingEvent
from kvsm.errors import IllegalTransition, InvalidEvent
from kvsm.frozen import FrozenState, freeze
from kvsm.ids import pack
from kvsm.ledger import Ledger
from kvsm.policies import POLICIES
from kvsm.snapshot import snapshot
from kvsm.worlds.core_options import CoreOptions, draw_options
from kvsm.worlds.core_world import CoreWorld
