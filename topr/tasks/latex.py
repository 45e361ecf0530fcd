r"""A normal form of short LaTeX answers: one spelling, `\frac{1}{2}`, for `\dfrac12`, `\frac 1 2` and `1/2`.

Only the spelling changes and nothing is computed, so it takes no time. `equivalence.py` compares by mathematics.
"""

import re
from typing import Any

CHARACTERS = str.maketrans({
    "π": r"\pi ", "∞": r"\infty ", "°": r"^\circ ", "−": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "≤": r"\le ",
    "≥": r"\ge ", "±": r"\pm ", "∪": r"\cup ", "∈": r"\in ", "√": r"\sqrt ", "²": "^2", "³": "^3", "\u00a0": " ",
})  # fmt: skip
COMMANDS = dict.fromkeys(["mathrm", "mathit", "mathbf", "textrm", "textit", "textbf", "mbox"], r"\text") | {
    "dfrac": r"\frac", "tfrac": r"\frac", "dbinom": r"\binom", "times": r"\cdot", "leq": r"\le", "geq": r"\ge",
    "neq": r"\ne", "lt": "<", "gt": ">", "lbrace": r"\{", "rbrace": r"\}", "degree": r"^\circ", "displaystyle": "",
}  # fmt: skip
# answers in units of different kinds differ, whatever their numbers; units of no kind are dropped
UNITS = [kind.split() for kind in (
    "cent cents ¢", "dollar dollars $", "m meter meters metre metres", "mm", "cm centimeter centimeters", "kg", "%",
    "km kilometer kilometers", "inch inches in", "foot feet ft", "yard yards", "mile miles mi", "second seconds sec s",
    "minute minutes min", "hour hours hr h", "day days", "week weeks", "month months", "year years yr", "g gram grams",
    "radian rad", r"degree degrees deg \circ", "am a.m", "pm p.m",
)]  # fmt: skip
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]

# in this order: a later rule relies on what the earlier ones have left
SPELLING: list[tuple[str, Any]] = [
    (r"\\(?:left|right|[bB]ig{1,2}[lrm]?)(?![a-zA-Z])( *\.(?!\d))?|\\(?:text)?color *\{[^{}]*\}", ""),
    (r"(?<!\\)\\[()\[\]]|(?<!\\)\$(?=.*\$)|(?<=.)(?<!\\)\$", ""),
    (r",\s*\\!\s*|\{\s*,\s*\}", ","),
    (r"(?<!\\)\\[!,;:> ]|~|\s+", " "),
    (r"\\(?:math(?:rm|it|bf)|boldsymbol|text[a-z]{2}) *\{ *([a-zA-Z]) *\}", r"\1"),
    (r"\\([a-zA-Z]+)", lambda m: COMMANDS.get(m[1], m[0])),
    (r"\{ *\\(?:rm|bf|it)(?![a-zA-Z])", r"\\text{"),
    (r"\\text *\{ *([-.\d][^{}]*)\}", r"\1"),
    (r"\\\\ *\[ *[\d.]+ *[a-z]{2} *\]", r"\\\\"),  # space between rows
    (r"(?<=\d) *(?:\^ *)?(?:\{ *)?(?:\\text *\{ *)?(?:st|nd|rd|th)(?![a-zA-Z])(?: *\}){0,2}", ""),
    (r"^ *(?:\\text *\{[^{}]*(?:\b(?:is|are)|:|=) *\}(?=.)|=|\\approx(?![a-zA-Z]))", ""),
    (r"\\\{ *\\\}", r"\\emptyset "),
    (r"\^ *\{? *\\circ(?![a-zA-Z]) *\}?", r"^{\\circ}"),
    (r"\((\d+)\) *_", r"\1_"),
    (rf"_ *\{{? *(?:\\text *\{{)? *({'|'.join(NUMBERS)})(?: *\}}){{0,2}}", lambda m: f"_{{{NUMBERS.index(m[1])}}}"),
    (r"\\%|\\text *\{ *(?:percent|percentage|\\?%) *\}|(?<![a-z]) *percent(?![a-z])", "%"),
    (r",? *\\text *\{,? *(and|or),? *\}", lambda m: ", " if m[1] == "and" else r" \or "),
]
_TOKEN = r"([0-9a-zA-Z]|\\[a-zA-Z]+)"
# where the answer is not words, after its units are gone
FORMULAS: list[tuple[str, Any]] = [
    (r",? *(?<![a-zA-Z\\])(and|or)(?![a-zA-Z])", lambda m: ", " if m[1] == "and" else r" \or "),
    (r"(?<![\\a-zA-Z])(pi|sqrt|infty)(?![a-zA-Z])|(?<!\\)infinity", lambda m: rf"\{m[1] or 'infty'} "),
    (r"(\\sqrt|\^) *\(([^()]*)\)", r"\1{\2}"),
    (r"(?<![\d./])(\d+) +(\d+) */ *(\d+)(?!\d)", r"\1\\frac{\2}{\3}"),
    (r"^(-?) *(\d+) */ *(\d+)$", r"\1\\frac{\2}{\3}"),
    (r"(?<=\d) +(?=\d{3}(?!\d))", ""),
    (r"(?<=\d)[eE]([-+]?\d+)(?![\w.])", r"\\cdot 10^{\1}"),
    (r"(?<![\d.])\.(?=\d|\\overline)", "0."),
    (r"(?<![\d.:,])0+(?=\d)", ""),
    (r"(^|[(\[{,]) *\+", r"\1"),
    (r"^\\\{ *[a-zA-Z] *(?:\\in *\\mathbb\{R\})? *(?:\\mid|:|\|)(.*)\\\}$", r"\1"),  # {x : x>2}
    # braces around every argument; unlike TeX, 2^10 is 2^{10}
    (r"([\^_]) *(-?\d+|[a-zA-Z]|\\[a-zA-Z]+)", r"\1{\2}"),
    (rf"(\\sqrt(?: *\[[^\[\]]*\])?|\\frac|\\binom)(?![a-zA-Z]) *{_TOKEN}", r"\1{\2}"),
    (rf"(\\(?:frac|binom) *\{{(?:[^{{}}]|\{{[^{{}}]*\}})*\}}) *{_TOKEN}", r"\1{\2}"),
]
# text that changes what an answer says, so that it is no unit
SAYS_MORE = re.compile(
    r"\b(?:or|and|not?|more|less|greater|fewer|than|least|most|mod|if|for|when|to|between|base|hundred|thousand|\w+illion)\b"
)
_SHORT = "|".join(name for kind in UNITS for name in kind if name.isalpha() and len(name) > 1)
_TEXT = r"\\text *\{[^{}]*\}"
# ++ never backtracks, so that long runs of words cost no time
UNIT = re.compile(
    rf"\\\$|^\$|(?<=[^\s,({{])(?: *(?:\\cdot|/)? *(?:{_TEXT}|\\frac *\{{ *{_TEXT} *\}} *\{{ *{_TEXT} *\}}"
    rf"|(?<![\\a-zA-Z])(?:{_SHORT}|deg|degrees?|sq|square|cubic|per|mph|units?)(?![a-zA-Z])(?:/[a-z]+)?"
    rf"|(?<=[\d)}}] )[msgh](?![a-zA-Z])|(?<= )[a-zA-Z]{{4,}})\.?(?: *\^ *\{{? *-?\d *\}}?)?)++(?= *(?:$|,|\\or|\\\}}))"
)


def read(text: str) -> tuple[str, frozenset[str]]:
    r"""The normal form of an answer (words as `\text{…}` in lower case), and the kinds of the units dropped from it."""
    text = text.translate(CHARACTERS)
    for pattern, spelling in SPELLING:
        text = re.sub(pattern, spelling, text)
    text = re.sub(r"[.,;: ]+$", "", text).strip()
    words = re.sub(r"\\text *\{([^{}]*)\}", r" \1 ", text).strip(" .")
    words = re.sub(r"^(?:(?:an?|the|on|in|The|[Cc]hoice|[Oo]ption) +)+(?=[(a-zA-Z])", "", words)
    long = words != text or re.search("[a-zA-Z]{4}", words)
    if words.lower() in NUMBERS:
        return str(NUMBERS.index(words.lower())), frozenset()
    if choice := re.fullmatch(r"\(? *([a-zA-Z]) *[).:]*|\(([A-F])\) .*", words):  # (C), or (C) with what it says
        return choice[1] or choice[2], frozenset()
    if re.fullmatch(r"[A-Z](?:(?: *,| +and| +or)+ +[A-Z])+", words):  # several choices
        text = words
    elif long and re.fullmatch(r"(?!infinity)[a-zA-Z][a-zA-Z '.-]*", words):
        return rf"\text{{{' '.join(words.lower().split())}}}", frozenset()
    dropped: list[str] = []

    def drop(match: re.Match) -> str:
        if SAYS_MORE.search(match[0]):
            return match[0]
        dropped.append(match[0])
        return ""

    if not re.search(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)", text):  # sin 30 is not the sine of 30 degrees
        text = re.sub(r"\^\{\\circ\} *(?:[CF](?![a-zA-Z]))?", drop, text)
    text = UNIT.sub(drop, text).strip(" ,")
    for pattern, spelling in FORMULAS:
        text = re.sub(pattern, spelling, text)
    if not re.search(r"[(\[]|\\\{", text):  # in (1,234) the comma separates coordinates
        text = re.sub(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])", lambda m: m[0].replace(",", ""), text)
    text = re.sub(r"(\\[a-zA-Z]+ ) *(?=[a-zA-Z])|(?<=\d)( ) *(?=\d)| ", lambda m: m[1] or m[2] or "", text)
    text = re.sub(r"^\{([^{}]*)\}$", r"\1", text)
    units = set(re.findall(r"[a-z]+(?:\.m)?|\\circ|[¢$%]", " ".join(dropped).lower() + "%" * ("%" in text)))
    return text, frozenset(kind[0] for kind in UNITS if units & set(kind))
