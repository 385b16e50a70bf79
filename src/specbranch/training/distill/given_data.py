"""Questions about tables, lists and records that are made up here by chance: a target copies from them in its answers.

Owns the texts and the questions about them; no word comes from elsewhere. Invariant: a seed gives the same questions.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

FIRST_NAMES = (
    *("Amara", "Bruno", "Chen", "Daria", "Elif", "Farid", "Greta", "Hiro", "Ines", "Jonas", "Kofi", "Lucia", "Malik"),
    *("Nadia", "Oskar", "Priya", "Quentin", "Rosa", "Sven", "Tariq", "Uma", "Viktor", "Wanda", "Yusuf", "Zoe"),
)
SURNAMES = (
    *("Abara", "Becker", "Costa", "Dvorak", "Eriksen", "Ferrari", "Gupta", "Haddad", "Ito", "Jansen", "Kowalski"),
    *("Lindberg", "Moreau", "Novak", "Okafor", "Petrov", "Rossi", "Silva", "Tanaka", "Weber", "Yilmaz"),
)
CITIES = (
    *("Lisbon", "Graz", "Kyoto", "Accra", "Lima", "Oslo", "Lyon", "Porto", "Tunis", "Gdansk", "Quito", "Hanoi"),
    *("Bergen", "Izmir", "Leeds", "Nairobi", "Perth", "Riga", "Seville", "Turin"),
)
THINGS = (
    *("lamp", "kettle", "bicycle pump", "desk chair", "notebook", "raincoat", "teapot", "drill", "backpack", "mirror"),
    *("garden hose", "headset", "ladder", "toaster", "tent", "umbrella", "vase", "whiteboard", "yoga mat", "bookshelf"),
)
JOBS = ("nurse", "carpenter", "teacher", "pilot", "chemist", "gardener", "lawyer", "cook", "editor", "welder", "clerk")
MONTHS = ("January", "March", "April", "June", "July", "September", "October", "December")
STATES = ("open", "shipped", "late", "paid", "cancelled", "returned", "in review", "done")
ON_ROWS = (
    *("Which row has the highest {number}?", "List every {text} in alphabetical order.", "Return this as JSON."),
    *("Sort the rows by {number} and show all of them.", "Convert this to CSV.", "Show it as a Markdown table."),
    *("Show only the columns {text} and {number}.", "How many rows are there, and what is the sum of {number}?"),
    *(
        "Write one sentence for each row.",
        "Add a column with the {number} doubled.",
        "Which {text} occurs in row {at}?",
    ),
    *(
        "Repeat the rows whose {number} is above {limit}.",
        "What is the {number} of {key}?",
        "Swap the first two columns.",
    ),
)
ON_NOTES = (
    *(
        "Extract names, dates and amounts as JSON.",
        "Make a table of who does what and when.",
        "What happens in {city}?",
    ),
    *("Rewrite this as a friendly e-mail.", "Sum this up in one sentence.", "Put the points in order of their dates."),
    *("Which points mention {name}? Quote them.", "Translate this into German.", "Translate this into Spanish."),
)


@dataclass(frozen=True, slots=True)
class _Table:
    """Rows of values; the first column names a row."""

    columns: tuple[str, ...]
    numbers: tuple[str, ...]  # the columns of numbers
    rows: list[tuple[object, ...]]


def data_questions(count: int, seed: int) -> list[str]:
    """Return questions, each with the table, the records or the notes that it is about."""
    random = Random(seed)
    return [_question(random) for _ in range(count)]


def _question(random: Random) -> str:
    text, question = _about_notes(random) if random.random() < 0.3 else _about_table(random)
    return f"{question}\n\n{text}" if random.random() < 0.5 else f"{text}\n\n{question}"


def _about_table(random: Random) -> tuple[str, str]:
    table = random.choice((_orders, _people, _stock))(random, random.randint(4, 14))
    row = random.randrange(len(table.rows))
    number = random.choice(table.numbers)
    at = table.columns.index(number)
    text = random.choice([column for column in table.columns if column not in table.numbers])
    limit = sorted(str(one[at]) for one in table.rows)[len(table.rows) // 2]
    fields = {"number": number, "text": text, "at": row + 1, "limit": limit, "key": table.rows[row][0]}
    return random.choice(TABLE_FORMATS)(table), random.choice(ON_ROWS).format(**fields)


def _about_notes(random: Random) -> tuple[str, str]:
    points = [_point(random) for _ in range(random.randint(4, 12))]
    mark = random.choice(("- ", "* ", ""))
    fields = {"city": random.choice(CITIES), "name": random.choice(FIRST_NAMES)}
    return "\n".join(f"{mark}{point}" for point in points), random.choice(ON_NOTES).format(**fields)


def _point(random: Random) -> str:
    who, thing, city = (random.choice(words) for words in (FIRST_NAMES, THINGS, CITIES))
    day, hour = f"{random.randint(1, 28)} {random.choice(MONTHS)}", random.randint(8, 19)
    amount, number, cents = random.randint(5, 900), random.randint(1000, 9999), random.randint(10, 99)
    forms = (
        f"{who} calls {random.choice(FIRST_NAMES)} about the {thing} on {day} at {hour}:30.",
        f"The {thing} for {city} costs {amount} euros and leaves on {day}.",
        f"{day}: {who} {random.choice(SURNAMES)} meets the {random.choice(JOBS)} in {city}, room {amount}.",
        f"Invoice {number} over {amount}.{cents} is {random.choice(STATES)} since {day}.",
    )
    return random.choice(forms)


def _name(random: Random) -> str:
    return f"{random.choice(FIRST_NAMES)} {random.choice(SURNAMES)}"


def _orders(random: Random, count: int) -> _Table:
    rows: list[tuple[object, ...]] = [
        (f"A-{random.randint(1000, 9999)}", _name(random), random.choice(THINGS), random.randint(1, 12),
         random.choice(STATES))
        for _ in range(count)
    ]  # fmt: skip
    return _Table(("order", "customer", "item", "quantity", "status"), ("quantity",), rows)


def _people(random: Random, count: int) -> _Table:
    rows: list[tuple[object, ...]] = [
        (_name(random), random.randint(19, 64), random.choice(JOBS), random.choice(CITIES),
         100 * random.randint(18, 72))
        for _ in range(count)
    ]  # fmt: skip
    return _Table(("name", "age", "job", "city", "salary"), ("age", "salary"), rows)


def _stock(random: Random, count: int) -> _Table:
    rows: list[tuple[object, ...]] = [
        (thing, f"{random.randint(3, 250)}.{random.randint(0, 9)}0", random.randint(0, 400), random.choice(CITIES))
        for thing in random.sample(THINGS, min(count, len(THINGS)))
    ]
    return _Table(("item", "price", "stock", "warehouse"), ("price", "stock"), rows)


def _markdown(table: _Table) -> str:
    lines = (table.columns, ["---"] * len(table.columns), *table.rows)
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _csv(table: _Table) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([table.columns, *table.rows])
    return out.getvalue().rstrip()


def _json(table: _Table) -> str:
    return json.dumps([dict(zip(table.columns, row, strict=True)) for row in table.rows], indent=1)


def _lines(table: _Table) -> str:
    return "\n".join(
        "; ".join(f"{column}: {value}" for column, value in zip(table.columns, row, strict=True)) for row in table.rows
    )


TABLE_FORMATS: Sequence[Callable[[_Table], str]] = (_markdown, _csv, _json, _lines)
