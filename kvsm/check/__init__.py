"""The checkers: an explorer of all interleavings, a random walk, and the reduction of their failures."""
