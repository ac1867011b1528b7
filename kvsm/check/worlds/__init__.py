"""Small worlds: the real code, in surroundings where each step is an action that the driver chooses."""

from kvsm.check.worlds.world import Action, Finding, World, finding_of

__all__ = ["Action", "Finding", "World", "finding_of"]
