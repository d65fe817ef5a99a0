"""How recall documents write facts: formats of lists, phrases of prose, and kinds of keys and values.

None is a format of `linearize_evals`' tasks: no list has lines `key: value` or `"key": "value",`. Numbers have other
lengths than in the test of the same kind: lists aren't of 3 or 4 digits, prose hasn't 5 or 7.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from linearize.training import recall_words as words


class Style(NamedTuple):
    """A fact is `before`, its value, `after`, with the key for each `{k}`; `head` stands before a list of them."""

    before: str
    after: str
    head: str = ""


LINES = (
    Style("{k} -> ", "\n"),
    Style("{k} = ", "\n"),
    Style("{k} | ", "\n"),
    Style("| {k} | ", " |\n", "| entry | value |\n|---|---|\n"),
    Style("{k},", "\n", "item,value\n"),
    Style("{k};", "\n", "id;value\n"),
    Style("{k}\t", "\n"),
    Style("- {k} (", ")\n"),
    Style("* **{k}** ", "\n"),
    Style('{"id": "{k}", "value": "', '"}\n'),
    Style("- id: {k}\n  value: ", "\n"),
    Style("{k}:\n  value: ", "\n"),
    Style("[{k}]\nvalue=", "\n"),
    Style("<entry id='{k}'>", "</entry>\n"),
    Style("<{k}>", "</{k}>\n"),
    Style("set {k} ", "\n"),
    Style("let {k} = ", ";\n"),
    Style("#define {k} ", "\n"),
    Style('table["{k}"] = "', '"\n'),
    Style("put('{k}', '", "');\n"),
    Style("({k}, ", "), "),
    Style("{k}=", "&"),
    Style("{k} is ", ", "),
    Style("{k} has ", "; "),
    Style("{k} stands for ", ".\n"),
    Style("{k} ", "\n"),
    Style("{k} ...... ", "\n"),
    Style("{k}\n    ", "\n"),
    Style("", " <- {k}\n"),
    Style("", " {k}\n"),
    Style("", " belongs to {k}; "),
)
_STARTS = ("", "", "", "- ", "* ", "> ", "+ ", "no. ", "@", "/")
_KEYS = ("{k}", "{k}", "{k}", "'{k}'", '"{k}"', "`{k}`", "[{k}]", "<{k}>", "_{k}_")
_JOINTS = (
    " -> ",
    " => ",
    " = ",
    "=",
    " == ",
    " := ",
    " ~ ",
    " / ",
    " | ",
    " - ",
    " >> ",
    " & ",
    "\t",
    " .. ",
    " @ ",
    " :: ",
)
_WRAPS = (("", ""), ("", ""), ("", ""), ('"', '"'), ("'", "'"), ("(", ")"), ("[", "]"), ("`", "`"), ("<", ">"))
_ENDS = ("\n", "\n", "\n", "; ", ", ", ";\n", ",\n", " | ", ".\n", "\n\n")

QUESTIONS = (  # about an entry of a list
    Style("What is {k}? ", "\n"),
    Style("Q: {k}? A: ", "\n"),
    Style("Question - what goes with {k}?\nAnswer - ", "\n"),
    Style("> get {k}\n", "\n"),
    Style("? {k} ! ", "\n"),
    Style("lookup({k}) returns ", "\n"),
    Style(">>> table['{k}']\n'", "'\n"),
    Style("The value for {k} is ", ".\n"),
    Style("For {k} we have ", ".\n"),
    Style("{k} was listed with ", ".\n"),
    Style("As listed, {k} goes with ", ". "),
    Style("Find {k}. Found ", ".\n"),
    Style("user asks {k}, reply is ", "\n"),
)
PROSE = (  # a fact, and a question that its value answers
    (Style("The locker of {k} holds ", "."), "What does the locker of {k} hold?"),
    (Style("The entry for {k} reads ", "."), "What does the entry for {k} read?"),
    (Style("{k} is filed under ", "."), "Under what is {k} filed?"),
    (Style("Whoever asks about {k} shall be told ", "."), "What shall one be told about {k}?"),
    (Style("It is known that {k} was assigned ", "."), "What was {k} assigned?"),
    (Style("", " was the answer that {k} gave."), "What was the answer that {k} gave?"),
    (Style("In the register, {k} is followed by ", "."), "What follows {k} in the register?"),
    (Style("Please note that {k} corresponds to ", "."), "What corresponds to {k}?"),
    (Style("The sealed envelope marked {k} contained ", "."), "What did the envelope marked {k} contain?"),
    (Style("Locker ", " belongs to {k}."), "Which locker belongs to {k}?"),
    (Style("The label ", " is attached to {k}."), "Which label is attached to {k}?"),
    (Style("Only {k} knew that the right reply was ", "."), "Which reply did {k} know?"),
    (Style("They agreed to write {k} as ", " from then on."), "How did they agree to write {k}?"),
    (Style("{k} received ", " at the auction."), "What did {k} receive at the auction?"),
    (Style("Under {k}, the inventory gives ", "."), "What does the inventory give under {k}?"),
    (Style("On the back of {k} somebody had scribbled ", "."), "What was scribbled on the back of {k}?"),
    (Style("The combination chosen by {k} is ", "."), "Which combination was chosen by {k}?"),
    (Style("When called, {k} answers to ", "."), "To what does {k} answer?"),
    (Style("Remember ", " whenever {k} is mentioned."), "What should be remembered when {k} is mentioned?"),
    (Style("{k}, so the clause says, means ", " here."), "What does {k} mean according to the clause?"),
)
ASKS = (  # how a question is put: before it, between it and the answer, after that
    ("\n", " ", "."),
    ("\nQ. ", " A. ", ""),
    ("\nQuestion - ", "\nAnswer - ", ""),
    ("\n- ", " - ", ""),
    ("\n[asked] ", "\n[replied] ", "\n"),
    ("\n", " It is ", "."),
)
REMINDERS = ("\n", "\n", " ", "\n\n", "\nTo repeat what was said above. ", "\nOnce more. ", "\nIn short. ", "\n> ")
BREAKS = (
    "\n",
    "\n",
    "\n---\n",
    "\n\n",
    "\n* * *\n",
    "\nagain\n",
    "\nin another order\n",
    "\ncheck\n",
    "\nrecall\n",
    "\n## Quiz\n",
)
TITLES = (
    "",
    "",
    "",
    "# Register\n",
    "Inventory\n",
    "Glossary\n\n",
    "The following holds.\n",
    "== settings ==\n",
    "<!-- data -->\n",
)
FIELDS = (
    "quantity",
    "origin",
    "nickname",
    "code",
    "colour",
    "rank",
    "expiry",
    "extension",
    "batch",
    "remark",
    "supplier",
)


def line_style(rng: random.Random) -> Style:
    """One of the written formats, or one of thousands that are put together."""
    if rng.random() < 0.5:
        return rng.choice(LINES)
    opening, closing = rng.choice(_WRAPS)
    return Style(rng.choice(_STARTS) + rng.choice(_KEYS) + rng.choice(_JOINTS) + opening, closing + rng.choice(_ENDS))


Make = Callable[[random.Random], str]
Kinds = dict[str, tuple[Make, int]]  # how one is made, and about how many different ones there are
_CASES: tuple[Callable[[str], str], ...] = (str, str, str, str, str.lower, str.title, str.upper)
_LETTERS, _HEX = "ABCDEFGHJKLMNPQRSTUVWXYZ", "0123456789abcdef"


def _number(digits: int) -> Make:
    return lambda rng: str(rng.randrange(10 ** (digits - 1), 10**digits))


def _code(rng: random.Random) -> str:
    return "".join(rng.choices(_LETTERS, k=2)) + f"-{rng.randrange(10, 100)}" + rng.choice(_LETTERS)


def _pair(joint: str) -> Make:
    return lambda rng: rng.choice(words.ADJECTIVES) + joint + rng.choice(words.CREATURES)


def _from(pool: tuple[str, ...]) -> Make:
    return lambda rng: rng.choice(pool)


_WORDS: Kinds = {
    "adjective": (_from(words.ADJECTIVES), len(words.ADJECTIVES)),
    "creature": (_from(words.CREATURES), len(words.CREATURES)),
    "name": (_from(words.FIRST_NAMES), len(words.FIRST_NAMES)),
    "place": (_from(words.PLACES), len(words.PLACES)),
    "verb": (_from(words.VERBS), len(words.VERBS)),
    "invented": (words.invented, 10**6),
    "pair": (_pair(" "), 10**5),
    "snake": (_pair("_"), 10**5),
    "code": (_code, 10**5),
}
_NUMBERS: Kinds = {f"{digits} digits": (_number(digits), 9 * 10 ** (digits - 1)) for digits in range(2, 8)}
_OTHERS: Kinds = {
    "hex": (lambda rng: "".join(rng.choices(_HEX, k=6)), 10**6),
    "time": (lambda rng: f"{rng.randrange(24)}h{rng.randrange(60):02}", 1440),
    "price": (lambda rng: f"${rng.randrange(1, 100)}.{rng.randrange(100):02}", 9900),
    "groups": (lambda rng: f"{rng.randrange(10, 100)}-{rng.randrange(100, 1000)}-{rng.randrange(10, 100)}", 10**6),
    "decimal": (lambda rng: f"{rng.randrange(10)}.{rng.randrange(1000):03}", 10**4),
    "reference": (lambda rng: f"#{rng.randrange(1000, 10000)}", 9000),
    "ratio": (lambda rng: f"{rng.randrange(2, 100)}/{rng.randrange(2, 100)}", 9000),
    "several": (lambda rng: " ".join(rng.choice(words.ADJECTIVES) for _ in range(3)), 10**6),
    "mixed": (lambda rng: f"{rng.choice(words.FIRST_NAMES)} {rng.randrange(10, 100)}", 20_000),
}
KEYS: Kinds = _WORDS | {"tag": (lambda rng: f"#{rng.randrange(100, 1000)}", 900)}
LIST_VALUES: Kinds = (
    _WORDS | _OTHERS | {name: _NUMBERS[name] for name in ("2 digits", "5 digits", "6 digits", "7 digits")}
)
PROSE_VALUES: Kinds = (
    _WORDS | _OTHERS | {name: _NUMBERS[name] for name in ("2 digits", "3 digits", "4 digits", "6 digits")}
)


def draw(rng: random.Random, kinds: Kinds, count: int, taken: set[str], *, unlike: str = "") -> tuple[str, list[str]]:
    """The kind of some words, and `count` different ones of it, none of them taken; then they are.

    Args:
        rng: source of randomness.
        kinds: what to choose from; those with too few words for `count` are left out.
        count: how many.
        taken: words, in lower case, that would be ambiguous.
        unlike: a kind that isn't to be chosen.
    """
    names = [name for name, (_, many) in kinds.items() if many >= 2 * count and name != unlike]
    weights = [3 if name in _NUMBERS else 1 for name in names]  # digits are what recall is asked for most
    kind = rng.choices(names, weights)[0]
    make, case = kinds[kind][0], rng.choice(_CASES)
    found: list[str] = []
    tries = 0
    while len(found) < count:
        word = make(rng) if tries < 20 * count else words.invented(rng)  # most of a small kind may be taken
        tries += 1
        if word.lower() not in taken:
            taken.add(word.lower())
            found.append(case(word))
    return kind, found
