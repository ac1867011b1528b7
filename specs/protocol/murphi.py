"""Export the protocol as a Murphi text, for Rumur.

The effects of an action happen at once, but Murphi runs statements one after the other. So the effects are
sorted: each comes before the effects that overwrite variables which it reads.
"""

from __future__ import annotations

from textwrap import wrap

from kvsm.check.protocol.terms import (
    Action,
    After,
    Assign,
    Claim,
    Const,
    Declaration,
    Domain,
    If,
    Labels,
    Not,
    OneOf,
    Param,
    Read,
    Term,
    Total,
    Truth,
    UpTo,
    Variable,
    Words,
    words_of,
)
from protocol.export import (
    WIDTH,
    Sort,
    TableRow,
    all_parts,
    assigns_of,
    claim_name,
    comment,
    file_name,
    indented,
    pascal,
    simplified,
    sort_of,
    table_rows,
    words_in,
)
from protocol.murphi_terms import (
    MurphiSpeaker,
    free_params,
    is_none,
    label_name,
    set_name,
    state_name,
    trigger_name,
    words_name,
)


def murphi_text(declared: Declaration) -> str:
    """The whole text. Progress (S9) is a liveness property."""
    speaker = MurphiSpeaker()
    uses = [
        _forgetting(declared, speaker),
        *(_rule(action, speaker) for action in declared.acting),
        *(
            _property("invariant", claim_name(claim), claim, speaker)
            for claim in (*declared.always, *declared.invariants)
        ),
        *(_property("cover", claim.id, claim, speaker) for claim in declared.sometimes),
        _rest(declared, speaker),
    ]
    rank = ["function rank(): Count;", "begin", f"  return {speaker.flat(declared.rank)};", "end;"]
    sections = [
        _header(declared),
        _types(declared),
        _variables(declared),
        *(_machine(words) for words in words_in(declared)),
        *_totals(speaker),
        [*comment("--", "An upper bound on the draining actions left to take."), *rank],
        *uses[:1],
        _start(declared, speaker),
        *uses[1:],
    ]
    return "\n\n".join("\n".join(section) for section in sections) + "\n"


def _header(declared: Declaration) -> list[str]:
    text = (
        f"The {declared.name}. Within these bounds: {declared.bounds}.\n"
        "\n"
        f"The same protocol as in {pascal(file_name(declared))}.tla beside it, which is easier to read. "
        "Murphi's undefined value stands for None. Not modelled:\n"
        + "\n".join(f"- {note}" for note in declared.notes)
        + "\n"
        "\n"
        "Generated from kvsm's declaration and tables (specs/protocol/texts.py); do not edit."
    )
    return comment("--", text)


def _types(declared: Declaration) -> list[str]:
    lines = ["type", "  Count: 0..255;"]
    lines += [f"  {set_name(members)}: scalarset({members.size});" for members in declared.index_sets]
    domains = dict.fromkeys(variable.domain for variable in declared.variables)
    for domain in domains:
        if isinstance(domain, Labels):
            names = [label_name(domain, value) for value in range(domain.size)]
            lines += _enum(_labels_name(domain), names)
        elif isinstance(domain, Words):
            lines += _word_types(domain)
    return lines


def _enum(name: str, members: list[str]) -> list[str]:
    return [f"  {name}: enum {{", *indented(wrap(", ".join(members), WIDTH), 4), "  };"]


def _labels_name(labels: Labels) -> str:
    return f"{labels.name.capitalize()}"


def _word_types(words: Words) -> list[str]:
    name, machine = words.machine.name.capitalize(), words.machine
    states = [state_name(words, state) for state in [*machine.states.__members__, "ILLEGAL"]]
    triggers = [trigger_name(words, trigger.name) for trigger in machine.triggers]
    counters = [f"{counter.name}: 0..{limit};" for counter, limit in zip(machine.counters, words.limits)]
    return [
        *_enum(f"{name}State", states),
        *_enum(f"{name}Trigger", triggers),
        f"  {words_name(words)}: record state: {name}State; {' '.join(counters)} end;",
    ]


def _variables(declared: Declaration) -> list[str]:
    lines = ["var"]
    for variable in declared.variables:
        arrays = "".join(f"array [{set_name(members)}] of " for members in variable.indices)
        lines += [*comment("  --", variable.says), f"  {variable.name}: {arrays}{_type_of(variable.domain)};"]
    return lines


def _type_of(domain: Domain) -> str:
    match domain:
        case Truth():
            return "boolean"
        case UpTo(limit):
            return f"0..{limit}"
        case OneOf(members):
            return set_name(members)
        case Labels():
            return _labels_name(domain)
        case Words():
            return words_name(domain)


def _machine(words: Words) -> list[str]:
    """Three functions: the row that a step takes, the step, and the state after it."""
    name = words.machine.name
    title, rows = name.capitalize(), table_rows(words)
    given = f"trigger: {title}Trigger"
    nothing = "".join(f" word.{counter.name} := 0;" for counter in words.machine.counters)
    return [
        *comment("--", f"The row of the {name}'s table that matches; 0 if none does."),
        f"function {name}_row({given}; word: {words_name(words)}): Count;",
        "begin",
        *(line for number, row in enumerate(rows, 1) for line in _row(words, row, number)),
        "  return 0;",
        "end;",
        "",
        f"procedure {name}_step({given}; var word: {words_name(words)});",
        "begin",
        f"  switch {name}_row(trigger, word)",
        *(f"    case {number}:{_changes(words, row)}" for number, row in enumerate(rows, 1)),
        f"    else word.state := {state_name(words, 'ILLEGAL')};{nothing}",
        "  end;",
        "end;",
        "",
        f"function {name}_after({given}; word: {words_name(words)}): {title}State;",
        f"var after: {words_name(words)};",
        "begin",
        "  after := word;",
        f"  {name}_step(trigger, after);",
        "  return after.state;",
        "end;",
    ]


def _row(words: Words, row: TableRow, number: int) -> list[str]:
    states = " | ".join(f"word.state = {state_name(words, source)}" for source in row.sources)
    conditions = [f"trigger = {trigger_name(words, row.trigger)}", f"({states})"]
    for counter, (low, high) in row.ranges.items():
        field = f"word.{counter}"
        conditions.append(f"{field} = {low}" if low == high else f"{low} <= {field} & {field} <= {high}")
    lines = [conditions[0], *(f"& {condition}" for condition in conditions[1:])]
    return indented([f"-- {row.why}", *_if(lines, [f"return {number};"], [])])


def _changes(words: Words, row: TableRow) -> str:
    said = f" word.state := {state_name(words, row.target)};" if row.target else ""
    for counter, by in row.changes.items():
        field = f"word.{counter}"
        said += (
            f" {field} := 0;" if by is None else f" {field} := {field} {'+' if by > 0 else '-'} {abs(by)};"
        )
    return said


def _totals(speaker: MurphiSpeaker) -> list[list[str]]:
    """The functions for the totals in use; a function comes after the functions that it calls."""
    sections: dict[Total, list[str]] = {}

    def place(total: Total) -> None:
        for part in all_parts(total.body):
            if isinstance(part, Total):
                place(part)
        sections.setdefault(total, _total(total, speaker))

    for total in list(speaker.totals):
        place(total)
    return list(sections.values())


def _total(total: Total, speaker: MurphiSpeaker) -> list[str]:
    name, param = speaker.flat(total).partition("(")[0], total.param
    params = "; ".join(f"{free.name}: {set_name(free.members)}" for free in free_params(total))
    counted = ["total := total + (", *indented(speaker.lines(total.body)), ");"]
    if sort_of(total.body) is Sort.TRUTH:
        counted = _if(speaker.lines(total.body), ["total := total + 1;"], [])
    return [
        f"function {name}({params}): Count;",
        "var total: Count;",
        "begin",
        "  total := 0;",
        *indented(_for_all((param,), counted)),
        "  return total;",
        "end;",
    ]


def _if(condition: list[str], then: list[str], otherwise: list[str]) -> list[str]:
    said = [f"if {condition[0]}", *indented(condition[1:], 3)]
    said[-1] += " then"
    branch = ["else", *indented(otherwise)] if otherwise else []
    return [*said, *indented(then), *branch, "end;"]


def _for_all(params: tuple[Param, ...], body: list[str]) -> list[str]:
    for param in reversed(params):
        body = [f"for {param.name}: {set_name(param.members)} do", *indented(body), "end;"]
    return body


def _assign(cell: Read, value: Term, speaker: MurphiSpeaker) -> list[str]:
    """Statements for `cell := value`. A machine word is stepped in place, the inner step first."""
    target = speaker.flat(cell)
    match value:
        case If(condition, then, otherwise):
            branches = _assign(cell, then, speaker), _assign(cell, otherwise, speaker)
            if not branches[0]:
                condition, branches = Not(condition), branches[::-1]
            return _if(speaker.lines(condition, 80), *branches)
        case After(trigger, word):
            words = words_of(word)
            step = f"{words.machine.name}_step({trigger_name(words, trigger.name)}, {target});"
            return [*_assign(cell, word, speaker), step]
        case Const(Words() as words, place):
            return _assign_word(target, words, place)
        case Read() if value == cell:
            return []
        case Read(Variable(domain=OneOf())):
            source = speaker.flat(value)
            return _if([f"isundefined({source})"], [f"undefine {target};"], [f"{target} := {source};"])
    return [f"undefine {target};" if is_none(value) else f"{target} := {speaker.flat(value)};"]


def _assign_word(target: str, words: Words, place: int) -> list[str]:
    word = words.words[place]
    assert word is not None, "a declaration makes no word ILLEGAL by hand"
    state, counts = word
    fields = [f"{target}.state := {state_name(words, words.machine.states(state).name)};"]
    counters = zip(words.machine.counters, counts)
    return [*fields, *(f"{target}.{counter.name} := {count};" for counter, count in counters)]


def _in_order(assigns: list[tuple[tuple[Param, ...], Assign]]) -> list[tuple[tuple[Param, ...], Assign]]:
    """The effects, each before the effects that overwrite variables which it reads.

    Raises `TypeError` if there is no such order.
    """
    waiting, ordered = list(assigns), []
    while waiting:
        for effect in waiting:
            written = effect[1].cell.variable
            others = [other for other in waiting if other is not effect]
            if not any(written.name in _variables_read(other[1]) for other in others):
                break
        else:
            raise TypeError("two effects overwrite what the other reads: Murphi needs an order of effects")
        waiting.remove(effect)
        ordered.append(effect)
    return ordered


def _variables_read(assign: Assign) -> set[str]:
    """The names of the variables that the value of an effect reads."""
    return {part.variable.name for part in all_parts(assign.value) if isinstance(part, Read)}


def _effects(action: Action, speaker: MurphiSpeaker) -> list[str]:
    return [
        line
        for bound, assign in _in_order(list(assigns_of(action.effects)))
        for line in _for_all(bound, _assign(assign.cell, simplified(assign.value), speaker))
    ]


def _rule(action: Action, speaker: MurphiSpeaker) -> list[str]:
    """A rule for the action. A draining action asserts that the rank decreases (S9)."""
    body = [*_effects(action, speaker), "forget();"]
    begin = ["begin"]
    if action.drains:
        begin = ["var before: Count;", "begin", "  before := rank();"]
        body.append('assert rank() < before "S9";')
    rule = [
        f'rule "{action.name}"',
        *indented(speaker.lines(action.guard)),
        "==>",
        *begin,
        *indented(body),
        "end;",
    ]
    params = "; ".join(f"{param.name}: {set_name(param.members)}" for param in action.params)
    if params:
        rule = [f"ruleset {params} do", *indented(rule), "end;"]
    return [*comment("--", action.says), *rule]


def _forgetting(declared: Declaration, speaker: MurphiSpeaker) -> list[str]:
    lines = ["procedure forget();", "begin"]
    for one in declared.forgets:
        domain = one.cell.variable.domain
        reset = _assign(one.cell, Const(domain, domain.initial), speaker)
        body = _for_all(one.params, _if(speaker.lines(one.when), reset, []))
        lines += indented([*comment("--", one.why), *body])
    return [*lines, "end;"]


def _start(declared: Declaration, speaker: MurphiSpeaker) -> list[str]:
    lines = ['startstate "empty"', "begin"]
    for variable in declared.variables:
        params = tuple(Param(f"i{number}", members) for number, members in enumerate(variable.indices))
        domain = variable.domain
        body = _assign(variable[params], Const(domain, domain.initial), speaker)
        lines += indented(_for_all(params, body))
    return [*lines, "end;"]


def _property(kind: str, name: str, claim: Claim, speaker: MurphiSpeaker) -> list[str]:
    return [*comment("--", claim.says), f'{kind} "{name}"', *indented(speaker.lines(claim.term)), ";"]


def _rest(declared: Declaration, speaker: MurphiSpeaker) -> list[str]:
    says = "From every state, rest can be reached."
    return [*comment("--", says), 'liveness "S9"', *indented(speaker.lines(declared.rest)), ";"]
