"""A user's own world, as docs/testing.md shows it: a shelf that must not lose a book."""

from __future__ import annotations

from random import Random


class Shelf:
    """A shelf of books that are taken and returned. broken: the third returned book is lost."""

    events = ()
    broken = False

    def __init__(self, random: Random) -> None:
        self.size = random.randint(3, 5)
        self.here, self.lent, self.returns = self.size, 0, 0
        self.was_empty = False

    def actions(self):
        return [("lend",)] * (self.here > 0) + [("return",)] * (self.lent > 0)

    def draw(self, random: Random):
        return random.choice(self.actions())

    def do(self, action):
        if action not in self.actions():
            return False
        if action == ("lend",):
            self.here, self.lent = self.here - 1, self.lent + 1
            self.was_empty = self.was_empty or not self.here
        else:
            self.returns += 1
            self.lent -= 1
            self.here += not (self.broken and self.returns == 3)
        return True

    def check(self):
        assert self.here + self.lent == self.size, "a book is lost"

    def wind_down(self):
        return ("return",) if self.lent else None

    def describe(self):
        return {"here": str(self.here), "lent": str(self.lent)}

    def fingerprint(self):
        return bytes((self.size, self.here, self.lent))

    def reached(self):
        return ["the shelf was empty"] if self.was_empty else []


class BrokenShelf(Shelf):
    broken = True


def shelf_of(random: Random) -> Shelf:
    return Shelf(random)


def nothing(random: Random) -> int:
    return random.randint(1, 2)


def raising(random: Random) -> Shelf:
    raise LookupError(f"no shelf for {random!r:.8}")
