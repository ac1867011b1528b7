"""Export the protocol as a TLA+ module, for readers and for TLC.

The state is one record, `now`. An action is `now' = Forgetting([now EXCEPT ...])`, so all right sides read
the state before the action, as the declaration requires.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvsm.check.protocol.terms import (
    Action,
    And,
    Assign,
    Claim,
    Declaration,
    Domain,
    Forget,
    Labels,
    OneOf,
    Param,
    Truth,
    UpTo,
    Variable,
    Words,
)
from protocol.export import (
    TableRow,
    assigns_of,
    bulleted,
    claim_name,
    comment,
    file_name,
    in_one_word,
    indented,
    pascal,
    simplified,
    table_rows,
    terms_of,
    words_in,
)
from protocol.tla_terms import TlaSpeaker, machine_name, member_of, quoted, set_name, value_name

WIDEST = 77
RULE = "-" * WIDEST


def module_name(declared: Declaration) -> str:
    """The name of the module: Offload."""
    return pascal(file_name(declared))


def tla_module(declared: Declaration) -> str:
    """The whole text of the module."""
    sections = [
        _header(declared),
        _constants(declared),
        *(_machine(words) for words in words_in(declared)),
        _state(declared),
        _forgetting(declared.forgets),
        *(_action(action) for action in declared.acting),
        _behaviour(declared),
        *(_claim(claim) for claim in declared.always),
        _winding_down(declared),
        *_invariants(declared),
        *(_sometimes(claim) for claim in declared.sometimes),
        ["=" * WIDEST],
    ]
    return "\n\n".join("\n".join(section) for section in sections) + "\n"


def tla_configuration(declared: Declaration, *, symmetry: bool = False) -> str:
    """TLC's configuration: the members of the sets, and the claims to check.

    symmetry: count states that differ only in the numbering of members as one. TLC cannot check properties of
        steps then, so the claim that draining lowers the rank is left out.
    """
    lines = ["SPECIFICATION Spec", "CONSTANTS", "    None = None"]
    for members in declared.index_sets:
        names = (f"{members.name[0]}{number}" for number in range(1, members.size + 1))
        lines.append(f"    {set_name(members)} = {{{', '.join(names)}}}")
    claims = [claim_name(claim) for claim in (*declared.always, *declared.invariants)]
    lines += ["INVARIANTS", *(f"    {name}" for name in ("TypeOK", *claims, "S9_CanDrain"))]
    lines += ["SYMMETRY Symmetry"] if symmetry else ["PROPERTY S9_NearerToRest"]
    return "\n".join(lines) + "\n"


def _header(declared: Declaration) -> list[str]:
    tables = [machine_name(words) for words in words_in(declared)]
    text = (
        f"The {declared.name}. Within these bounds: {declared.bounds}.\n"
        "\n"
        f"{declared.about} {listed([f'{name}Step' for name in tables])} are the tables of "
        f"{listed([f'a {words.machine.name}' for words in words_in(declared)])}. "
        "A step that no row matches gives an ILLEGAL word, which S8 forbids.\n"
        "\n"
        "An action happens at once. After it, Forgetting resets what nothing can read any more, so that "
        "states do not differ by it.\n"
        "\n"
        "Not modelled:\n" + "\n".join(f"- {note}" for note in declared.notes) + "\n\n"
        "Generated from kvsm's declaration and tables (specs/protocol/texts.py); do not edit."
    )
    return [
        f" MODULE {module_name(declared)} ".center(WIDEST, "-"),
        *comment("\\*", text),
        "",
        "EXTENDS Naturals, FiniteSets, TLC",
    ]


def listed(names: list[str]) -> str:
    """`a, b and c`."""
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def _constants(declared: Declaration) -> list[str]:
    names = [set_name(members) for members in declared.index_sets]
    first, *others = (f"Permutations({name})" for name in names)
    return [
        f"CONSTANTS {', '.join(names)}  \\* Members are interchangeable.",
        "CONSTANT None  \\* No member of any of them.",
        "",
        "Symmetry ==",
        *indented([first, *(f"\\cup {other}" for other in others)], 4),
        "",
        "RECURSIVE SumOver(_, _)",
        "SumOver(f, set) ==",
        "    IF set = {} THEN 0",
        "    ELSE LET one == CHOOSE x \\in set : TRUE IN f[one] + SumOver(f, set \\ {one})",
        "Sum(f) == SumOver(f, DOMAIN f)",
    ]


def _machine(words: Words) -> list[str]:
    """A machine's words, and its step as the rows of its table."""
    name, machine = machine_name(words), words.machine
    states = quoted([*(state.name for state in machine.states if state in words.kept), "ILLEGAL"])
    limits = zip(machine.counters, words.limits)
    types = [[f"state : {states}"], *([f"{counter.name} : 0..{limit}"] for counter, limit in limits)]
    first, *others = table_rows(words)
    nothing = "".join(f", {counter.name} |-> 0" for counter in machine.counters)
    return [
        RULE,
        *comment("\\*", f"The {machine.name}: its words, and the word after a trigger."),
        f"{name}Words == [",
        *indented(_listed(types), 4),
        f'{name}Illegal == [state |-> "ILLEGAL"{nothing}]',
        f"{name}Step(trigger, word) ==",
        *indented(bulleted("CASE", [_case(first)]), 4),
        *(line for row in others for line in indented(bulleted("  []", [_case(row)]), 4)),
        f"      [] OTHER -> {name}Illegal",
    ]


def _case(row: TableRow) -> list[str]:
    """One row of a table, with its reason."""
    where = f"\\in {quoted(row.sources)}" if len(row.sources) > 1 else f'= "{row.sources[0]}"'
    conditions = [f'trigger = "{row.trigger}"', f"word.state {where}"]
    for counter, (low, high) in row.ranges.items():
        field = f"word.{counter}"
        conditions.append(f"{field} = {low}" if low == high else f"{field} \\in {low}..{high}")
    changes = [] if row.target is None else [f'!.state = "{row.target}"']
    for counter, by in row.changes.items():
        value = "0" if by is None else f"@ + {by}" if by > 0 else f"@ - {-by}"
        changes.append(f"!.{counter} = {value}")
    after = f"[word EXCEPT {', '.join(changes)}]" if changes else "word"
    condition = " /\\ ".join(conditions)
    return [f"\\* {row.why}", condition, f"    -> {after}"]


def _state(declared: Declaration) -> list[str]:
    """The variable, its type and its initial value."""
    types = [
        [*comment("\\*", variable.says), f"{variable.name} : {_type_of(variable)}"]
        for variable in declared.variables
    ]
    values = [[f"{variable.name} |-> {_initial_of(variable)}"] for variable in declared.variables]
    return [
        RULE,
        "VARIABLE now  \\* The state.",
        "",
        "TypeOK == now \\in [",
        *indented(_listed(types), 4),
        "",
        "Init == now = [",
        *indented(_listed(values), 4),
    ]


def _listed(items: list[list[str]]) -> list[str]:
    """Items on separate lines, separated by commas; a bracket follows the last."""
    *others, last = items
    lines = [line for item in others for line in [*item[:-1], f"{item[-1]},"]]
    return [*lines, *last[:-1], f"{last[-1]}]"]


def _type_of(variable: Variable) -> str:
    said = _values_of(variable.domain)
    for members in reversed(variable.indices):
        said = f"[{set_name(members)} -> {said}]"
    return said


def _values_of(domain: Domain) -> str:
    match domain:
        case Truth():
            return "BOOLEAN"
        case UpTo(limit):
            return f"0..{limit}"
        case OneOf(members):
            return f"{set_name(members)} \\cup {{None}}"
        case Labels(_, labels):
            return quoted(labels)
        case Words():
            return f"{machine_name(domain)}Words"


def _initial_of(variable: Variable) -> str:
    said = value_name(variable.domain, variable.domain.initial)
    for number, members in reversed(list(enumerate(variable.indices))):
        said = f"[i{number} \\in {set_name(members)} |-> {said}]"
    return said


def _forgetting(forgets: tuple[Forget, ...]) -> list[str]:
    lines, said = [RULE], "at"
    for forget in forgets:
        variable = forget.cell.variable
        name, speaker = f"Forget{pascal(variable.name)}", TlaSpeaker("at")
        loops = "".join(f"[{member_of(param)} |-> " for param in forget.params)
        forgotten = value_name(variable.domain, variable.domain.initial)
        lines += [
            *comment("\\*", forget.why),
            f"{name}(at) == [at EXCEPT !.{variable.name} = {loops}".rstrip(),
            *indented(bulleted("IF", [speaker.lines(forget.when)]), 4),
            f"    THEN {forgotten}",
            f"    ELSE {speaker.flat(forget.cell)}{']' * (len(forget.params) + 1)}",
            "",
        ]
        said = f"{name}({said})"
    return [*lines, "Forgetting(at) ==", *indented(said.replace("(", "(\n", len(forgets) - 1).split("\n"), 4)]


def _call(action: Action) -> str:
    params = ", ".join(param.name for param in action.params)
    return f"{pascal(action.name)}({params})" if params else pascal(action.name)


def _action(action: Action) -> list[str]:
    guard = simplified(action.guard)
    parts = terms_of(guard) if isinstance(guard, And) else [guard]
    changes = [_change(bound, assign) for bound, assign in assigns_of(action.effects)]
    return [
        *comment("\\*", action.says),
        f"{_call(action)} ==",
        *indented(bulleted("/\\", [TlaSpeaker("now").lines(part) for part in parts]), 4),
        "    /\\ now' = Forgetting([now EXCEPT",
        *indented(_listed(changes), 8)[:-1],
        f"        {_listed(changes)[-1]})",
    ]


def _change(bound: tuple[Param, ...], assign: Assign) -> list[str]:
    """One assignment of an action. Indices over which it is repeated must come last."""
    speaker, variable = TlaSpeaker("now"), assign.cell.variable
    fixed = tuple(index for index in assign.cell.indices if index not in bound)
    if assign.cell.indices != (*fixed, *bound):
        raise TypeError(f"the effect on {variable.name} is repeated for other indices than its last ones")
    place = "".join(f"[{speaker.flat(index)}]" for index in fixed)
    loops = "".join(f"[{member_of(param)} |-> " for param in bound)
    value = speaker.lines(assign.value, 80)
    value[-1] += "]" * len(bound)
    begin = f"!.{variable.name}{place} ="
    return (
        [f"{begin} {loops}{value[0]}"]
        if len(value) == 1
        else [f"{begin} {loops}".rstrip(), *indented(value, 4)]
    )


def _behaviour(declared: Declaration) -> list[str]:
    return [
        RULE,
        *_any_of("Next", "Everything that may happen.", declared.acting),
        "",
        *_any_of(
            "Drain",
            "The actions that bring things to their end.",
            [one for one in declared.acting if one.drains],
        ),
        "",
        "Spec == Init /\\ [][Next]_now",
    ]


def _any_of(name: str, says: str, actions: Iterable[Action]) -> list[str]:
    lines = [f"\\* {says}", f"{name} =="]
    for action in actions:
        params = ", ".join(member_of(param) for param in action.params)
        lines.append(f"    \\/ \\E {params} : {_call(action)}" if params else f"    \\/ {_call(action)}")
    return lines


def _claim(claim: Claim) -> list[str]:
    return [
        *comment("\\*", claim.says),
        f"{claim_name(claim)} ==",
        *indented(TlaSpeaker("now").lines(claim.term), 4),
    ]


def _invariants(declared: Declaration) -> list[list[str]]:
    """The auxiliary invariants, under a heading."""
    if not declared.invariants:
        return []
    says = "What else holds in every state. With it the properties above can be proved by induction."
    return [[RULE, *comment("\\*", says)], *(_claim(claim) for claim in declared.invariants)]


def _sometimes(claim: Claim) -> list[str]:
    """A "sometimes". TLC has no such claims: to find such a state, check the negation as an invariant."""
    return [
        *comment("\\*", f"It happens that {claim.id}. {claim.says}"),
        f"Sometimes_{in_one_word(claim.id)} ==",
        *indented(TlaSpeaker("now").lines(claim.term), 4),
    ]


def _winding_down(declared: Declaration) -> list[str]:
    speaker = TlaSpeaker("now")
    return [
        *comment("\\*", "Everything is wound down."),
        "Rest ==",
        *indented(speaker.lines(declared.rest), 4),
        "",
        *comment("\\*", "An upper bound on the draining actions left to take."),
        "Rank ==",
        *indented(speaker.lines(declared.rank), 4),
        "",
        *comment(
            "\\*",
            "Wherever the state is not at rest, an action can drain it, and each such action lowers the "
            "rank. So winding down ends from every state, and ends at rest.",
        ),
        "S9_CanDrain == Rest \\/ ENABLED Drain",
        "S9_NearerToRest == [][Drain => Rank' < Rank]_now",
    ]
