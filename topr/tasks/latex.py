r"""A normal form of short LaTeX answers: one spelling, `\frac{1}{2}`, for `\dfrac12`, `\frac 1 2` and `1/2`.

Only spelling is changed and nothing is computed, so that it can take no time; what is equal by mathematics is told in
`equivalence.py`.
"""

import re

UNICODE = {
    "π": r"\pi ", "∞": r"\infty ", "°": r"^\circ ", "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/",
    "≤": r"\le ", "≥": r"\ge ", "±": r"\pm ", "∪": r"\cup ", "∈": r"\in ", "∅": r"\emptyset ",
    "ℝ": r"\mathbb{R}", "²": "^2", "³": "^3", "½": r"\frac{1}{2}", "\u00a0": " ",
}  # fmt: skip
# two answers in units that have nothing in common differ, whatever their numbers; further units are not told apart
UNITS = {
    "cent": "cents?|¢", "dollar": r"dollars?|\\\$", "mm": "mm|milli(?:meter|metre)s?", "m": "m|meters?|metres?",
    "cm": "cm|centi(?:meter|metre)s?", "km": "km|kilo(?:meter|metre)s?", "inch": "in|inch|inches",
    "foot": "ft|foot|feet",
    "yard": "yd|yards?", "mile": "mi|miles?", "second": "s|sec|seconds?", "minute": "min|minutes?", "day": "days?",
    "hour": "h|hr|hours?", "week": "weeks?", "month": "months?", "year": "yr|years?", "radian": "rad|radians?",
    "degree": r"deg|degrees?|\^ *\{? *\\circ", "gram": "g|grams?", "kg": "kg|kilograms?",
    "percent": "%", "am": r"a\.?m\b", "pm": r"p\.?m\b",
}  # fmt: skip
FUNCTIONS = "arcsin|arccos|arctan|sin|cos|tan|cot|sec|csc|log|ln"
NUMBERS = {
    word: str(i)
    for i, word in enumerate(["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"])
}
BASES = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "sixteen"]
ARGUMENTS = {r"\frac": 2, r"\binom": 2, r"\sqrt": 1, "^": 1, "_": 1}

# in this order; a later rule relies on what the earlier ones have left
SPELLING = [
    (r"\\(?:left|right|[bB]ig{1,2}[lrm]?)(?![a-zA-Z])( *\.(?!\d))?", ""),
    (r"\\(?:(?:display|text)style|[lL]arge|small)(?![a-zA-Z])|\\(?:text)?color *\{[^{}]*\}|\\underline *(?=\{)", ""),
    (r"(?<!\\)\\[()\[\]]|(?<!\\)\$(?=.*\$)|(?<=.)(?<!\\)\$", ""),
    (r",\s*\\!\s*|\{\s*,\s*\}", ","),
    (r"(?<!\\)\\!|(?<=\d)(?:\\[,;: ]|~)(?=\d{3}(?!\d))", ""),
    (r"(?<!\\)\\[,;:> ]|~|\\q?quad(?![a-zA-Z])|\\[hv]space *\{[^{}]*\}|\s+", " "),
    (r"\{ *\\(?:rm|bf|it) ([^{}]*)\}|\\(?:rm|bf|it) *\{([^{}]*)\}", lambda m: rf"\mathrm{{{m[1] or m[2]}}}"),
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    (r"\\[dt]binom(?![a-zA-Z])", r"\\binom"),
    (r"\\l?dots(?![a-zA-Z])", r"\\dots"),
    (r"\\(?:math(?:rm|it|bf|sf)|boldsymbol|text[a-z]{2}) *\{ *([a-zA-Z]) *\}", r"\1"),
    (r"\\(?:math(?:rm|it|bf|sf)|text[a-z]{2}|textnormal|[mh]box|unit) *\{", r"\\text{"),
    (rf"\\(?:text|operatorname) *\{{ *({FUNCTIONS}) *\}}", r"\\\1 "),
    (r"\\text *\{[ ,.;]*\}", " "),
    (r"\\text *\{ *([-.\d][^{}]*)\}", r"\1"),
    (r"\\\\ *\[ *[\d.]+ *[a-z]{2} *\]", r"\\\\"),  # space between rows
    (r"(?<=\d) *(?:\^ *)?(?:\{ *)?(?:\\text *\{ *)?(?:st|nd|rd|th)(?![a-zA-Z])(?: *\}){0,2}", ""),
    (r"^ *(?:\\text *\{[^{}]*(?:\b(?:is|are)|:|=) *\}(?=.)|=|\\approx(?![a-zA-Z]))", ""),
    (r"\\([lr](?:brace|brack|vert))(?![a-zA-Z])",
     lambda m: {"lbrace": r"\{", "rbrace": r"\}", "lbrack": "[", "rbrack": "]"}.get(m[1], "|")),
    (r"\\(le|ge|ne)q(?:slant)?(?![a-zA-Z])", r"\\\1 "),
    (r"([<>])=", lambda m: r"\le " if m[1] == "<" else r"\ge "),
    (r"\\([lg])t(?![a-zA-Z])", lambda m: "<" if m[1] == "l" else ">"),
    (r"\\varnothing(?![a-zA-Z])|\\\{ *\\\}", r"\\emptyset"),
    (r"\\degrees?(?![a-zA-Z])|\^ *\{? *(?:\\circ|o)(?![a-zA-Z]) *\}?", r"^{\\circ}"),
    (rf"\(? *([0-9A-Z]+) *\)? *_ *\{{? *(?:\\text *\{{)? *({'|'.join(BASES)})(?: *\}}){{0,2}}",
     lambda m: f"{m[1]}_{{{16 if m[2] == 'sixteen' else BASES.index(m[2]) + 2}}}"),
    (r"\((\d+)\) *_", r"\1_"),
    (r"_ *\{? *\((\d+)\) *\}?", r"_{\1}"),
    (r"\\?%|\\text *\{ *(?:percent|percentage|\\?%) *\}|(?<![a-z]) *percent(?![a-z])", "%"),
    (r",? *\\text *\{,? *(and|or),? *\}", lambda m: ", " if m[1] == "and" else r" \or "),
]  # fmt: skip
# where the answer is no words, after its units are gone
FORMULAS = [
    (r",? *(?<![a-zA-Z\\])(and|or)(?![a-zA-Z])", lambda m: ", " if m[1] == "and" else r" \or "),
    (r"(?<![\\a-zA-Z])(pi|sqrt|infinity|infty)(?![a-zA-Z])", lambda m: "\\" + m[1].replace("infinity", "infty") + " "),
    (rf"(?<![\\a-zA-Z])({FUNCTIONS})(?![a-zA-Z])", r"\\\1 "),
    (r"(\\sqrt|\^) *\(([^()]*)\)", r"\1{\2}"),
    (r"\\(?:times|ast)(?![a-zA-Z])|(?<!\*)\*(?!\*)", r"\\cdot "),
    (r"(?<![\d./])(\d+) +(\d+) */ *(\d+)(?!\d)", r"\1\\frac{\2}{\3}"),
    (r"^(-?) *(\d+) */ *(\d+)$", r"\1\\frac{\2}{\3}"),
    (r"(?<=\d) +(?=\d{3}(?!\d))", ""),
    (r"(?<=\d)[eE]([-+]?\d+)(?![\w.])", r"\\cdot 10^{\1}"),
    (r"(?<![\d.])\.(?=\d|\\overline)", "0."),
    (r"(?<=\d)\.(?!\d|\\overline)", ""),
    (r"(?<![\d.:,])0+(?=\d)", ""),
    (r"(^|[(\[{,]) *\+", r"\1"),
]  # fmt: skip

_SHORT = "|".join(
    f"(?:{names})" for kind, names in UNITS.items() if kind not in ("m", "second", "hour", "gram", "degree", "percent")
)
_END = r"(?= *(?:$|,|\\or|\\\}))"
# ++ never looks back: words without end cost no time
_POWER = r"(?: *\^ *\{? *-?\d *\}?)?"
_TEXT = r" *\\text *\{([^{}]*)\}\.? *"
TEXT_UNIT = re.compile(
    rf"(?<=[^\s,({{]) *(?:(?:\\cdot|/)?{_TEXT}{_POWER}|\\frac *\{{{_TEXT}\}} *\{{{_TEXT}\}})++{_END}"
)
BARE_UNIT = re.compile(
    rf"(?<=[\d)}}])((?: *(?:{_SHORT}|deg|degrees?|sq|square|cubic|per|mph|units?)(?![a-zA-Z])(?:/[a-z]+)?\.?{_POWER}"
    rf"| +[msgh](?![a-zA-Z])| +[a-zA-Z]{{4,}})++){_END}"
)
# texts that change what an answer says: no units
SAYS_MORE = re.compile(
    r"\b(?:or|and|not|no|more|less|greater|fewer|than|least|most|mod|if|for|when|to|between|base|hundred|thousand|million|billion|trillion|dozen)\b"
)


def read(text: str) -> tuple[str, frozenset[str]]:
    r"""The normal form of an answer and the kinds of units that were dropped from it.

    Args:
        text: what the box holds, at most a few hundred characters.

    Returns:
        The normal form, `\text{…}` in lower case if the answer is words; the kinds of its units, keys of `UNITS`.
    """
    for symbol, command in UNICODE.items():
        text = text.replace(symbol, command)
    text = re.sub(r"√ *(\d+|[a-z])?", lambda m: rf"\sqrt{{{m[1]}}}" if m[1] else r"\sqrt ", text)
    for pattern, spelling in SPELLING:
        text = re.sub(pattern, spelling, text)
    text = re.sub(r"[.,;: ]+$", "", text).strip()
    words = re.sub(r"\\text *\{([^{}]*)\}", r" \1 ", text).strip(" .")
    words = re.sub(r"^(?:(?:an?|the|on|in|The|[Cc]hoice|[Oo]ption) +)+(?=[(a-zA-Z])", "", words)
    if words.lower() in NUMBERS:
        return NUMBERS[words.lower()], frozenset()
    if choice := re.fullmatch(r"\(? *([a-zA-Z]) *[).:]*", words):
        return choice[1], frozenset()
    if re.fullmatch(r"[A-Z](?:(?: *,| +and| +or)+ +[A-Z])+", words):  # several choices
        text = words
    elif re.fullmatch(r"(?!infinity)[a-zA-Z][a-zA-Z '.-]*", words) and (
        words != text or re.search(r"[a-zA-Z]{4}", words)
    ):
        return rf"\text{{{' '.join(words.lower().split())}}}", frozenset()
    dropped = []

    def drop(match: re.Match) -> str:
        if SAYS_MORE.search(match[0]):
            return match[0]
        dropped.append(match[0])
        return ""

    if not re.search(FUNCTIONS, text):  # sin 30 is not the sine of 30 degrees
        text = re.sub(r"\^\{\\circ\} *(?:[CF](?![a-zA-Z]))?", lambda m: dropped.append(m[0]) or "", text)
    text = re.sub(r"\\\$|^\$", lambda m: dropped.append(r"\$") or "", text)
    text = BARE_UNIT.sub(drop, TEXT_UNIT.sub(drop, text))
    text = re.sub(r"[.,;: ]+$", "", text).strip()
    for pattern, spelling in FORMULAS:
        text = re.sub(pattern, spelling, text)
    if not re.search(r"[(\[]|\\\{", text):  # in (1,234) the comma stands between coordinates
        text = re.sub(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])", lambda m: m[0].replace(",", ""), text)
    text = re.sub(r"(\\[a-zA-Z]+ ) *(?=[a-zA-Z])|(?<=\d)( ) *(?=\d)| ", lambda m: m[1] or m[2] or "", _brace(text))
    text = re.sub(r"^\{([^{}]*)\}$", r"\1", text)
    units = " ".join(dropped).lower() + "%" * ("%" in text)
    return text, frozenset(k for k, names in UNITS.items() if re.search(rf"(?<![a-z.])(?:{names})(?![a-z])", units))


def _brace(text: str) -> str:
    r"""Braces around every argument: `\frac12` is `\frac{1}{2}`. Unlike TeX, it takes `2^10` as meant, for `2^{10}`."""
    out, missing = [], [0]  # arguments still to come, for each group that is open
    for token in re.findall(r"\\sqrt *\[[^\[\]]*\]|\\[a-zA-Z]+|\\.|\s+|(?<=[\^_])-?\d+|.", text):
        if missing[-1] and token.isspace():
            continue
        if missing[-1] and token not in "{}":
            missing[-1] -= 1
            if token not in ARGUMENTS:
                out.append("{" + token + "}")
                continue
        elif token == "{":
            missing[-1] = max(missing[-1] - 1, 0)
            missing.append(0)
        elif token == "}" and len(missing) > 1:
            missing.pop()
        if token in ARGUMENTS or token.startswith("\\sqrt"):
            missing[-1] = ARGUMENTS.get(token, 1)
        out.append(token)
    return "".join(out)
