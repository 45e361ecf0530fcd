r"""A normal form of short LaTeX answers: one spelling, `\frac{1}{2}`, for `\dfrac12`, `\frac 1 2` and `1/2`.

Only the spelling changes and nothing is computed, so it takes no time. `equivalence.py` compares by mathematics.
"""

import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import yaml


@cache  # at first use, because every command imports this file
def tables() -> SimpleNamespace:
    """The tables of `latex.yaml`, their patterns compiled."""
    found = SimpleNamespace(**yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8")))
    for rule in found.spelling + found.formulas:
        pattern, new = rule
        rule[:] = re.compile(pattern), new if isinstance(new, str) else lambda m, new=new: new.get(m[1], m[0])
    found.characters, found.units = str.maketrans(found.characters), [kind.split() for kind in found.units]
    names = "|".join(name for kind in found.units for name in kind if name.isalpha() and len(name) > 1)
    for name in ("unit", "says_more", "costly"):
        setattr(found, name, re.compile("".join(getattr(found, name)).replace("NAMES", names)))
    return found


def read(text: str) -> tuple[str, frozenset[str]]:
    r"""The normal form of an answer (words as `\text{…}` in lower case), and the kinds of the units dropped from it."""
    known = tables()
    text = text.translate(known.characters)
    for pattern, spelling in known.spelling:
        text = pattern.sub(spelling, text)
    words = re.sub(r"\\text *\{([^{}]*)\}", r" \1 ", text).strip(" .")
    words = re.sub(r"^(?:(?:an?|the|on|in|The|[Cc]hoice|[Oo]ption) +)+(?=[(a-zA-Z])", "", words)
    long = words != text or re.search("[a-zA-Z]{4}", words)
    if words.lower() in known.numbers:
        return known.numbers[words.lower()], frozenset()
    if choice := re.fullmatch(r"\(? *([a-zA-Z]) *[).:]*|\(([A-F])\) .*", words):  # (C), or (C) with what it says
        return choice[1] or choice[2], frozenset()
    if re.fullmatch(r"[A-Z](?:(?: *,| +and| +or)+ +[A-Z])+", words):  # several choices
        text = words
    elif long and re.fullmatch(r"(?!infinity)[a-zA-Z][a-zA-Z '.-]*", words):
        return rf"\text{{{' '.join(words.lower().split())}}}", frozenset()
    dropped: list[str] = []

    def drop(match: re.Match) -> str:
        if known.says_more.search(match[0]):
            return match[0]
        dropped.append(match[0])
        return ""

    if not re.search(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)", text):  # sin 30 is not the sine of 30 degrees
        text = re.sub(r"\^\{\\circ\} *(?:[CF](?![a-zA-Z]))?", drop, text)
    text = known.unit.sub(drop, text).strip(" ,")
    for pattern, spelling in known.formulas:
        text = pattern.sub(spelling, text)
    if not re.search(r"[(\[]|\\\{", text):  # in (1,234) the comma separates coordinates
        text = re.sub(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])", lambda m: m[0].replace(",", ""), text)
    text = re.sub(r"(\\[a-zA-Z]+ ) *(?=[a-zA-Z])|(?<=\d)( ) *(?=\d)| ", r"\1\2", text)
    text = re.sub(r"^\{([^{}]*)\}$", r"\1", text)
    units = set(re.findall(r"[a-z]+(?:\.m)?|\\circ|[¢$%]", " ".join(dropped).lower() + "%" * ("%" in text)))
    return text, frozenset(kind[0] for kind in known.units if units & set(kind))
