"""Small worlds in which the real code runs, and in which nothing happens by itself."""

from kvsm.check.worlds.world import Action, Finding, World, finding_of

__all__ = ["Action", "Finding", "World", "finding_of"]
