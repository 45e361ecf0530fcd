r"""Whether two answers in normal form mean the same: structure by rules of ours, formulas by math-verify.

math-verify alone takes `(1,2)` for `\{1,2\}`, `5,5` for `5`, `2516_9` for `2516_8`, and numbers that differ after the
sixth decimal for equal. Here brackets, lists, bases and words are settled first, and decimals become fractions.

`judge.py` runs this file by its path in a process of its own, so it imports nothing of topr.
"""

import json
import logging
import os
import re
import resource
import signal
import sys

MEMORY = 1 << 30  # bytes of address space; math-verify itself takes a quarter
CLOSING = {"(": ")", "[": "]", "{": "}", r"\{": r"\}", r"\langle": r"\rangle", r"\begin": r"\end"}
MATRIX = re.compile(r"[(\[]?\\begin\{[pb]?(?:small)?(?:matrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\{[a-z]+\}[)\]]?")
NAME = re.compile(  # x, x_1, f'(x), f^{-1}(x), \angle ABC, words, (x,y)
    r"(?:m?\\angle ?)?\\?[a-zA-Z]+(?:_\{[^{}]*\}|\^\{-1\})?'?(?:\([^()]*\))?"
    r"|\\text\{[^{}]*\}|\(\\?[a-zA-Z]+(?:,\\?[a-zA-Z]+)+\)"
)
BASED = re.compile(r"([0-9A-Z]*[0-9][0-9A-Z]*)_\{(\d+)\}")


def same(gold: str, answer: str) -> bool:
    """Whether an answer means the same as the gold, both in the normal form of `latex.py`."""
    if gold == answer:
        return True
    if len({found[2] for text in (gold, answer) if (found := _interval(text))}) > 1:  # x>5 and y>5
        return False
    (gold_kind, golds), (kind, answers) = _structure(gold), _structure(answer)
    if {gold_kind, kind} == {"()", "list"}:  # (3,4) and x=3, y=4
        gold_kind, golds = _coordinates(gold_kind, golds)
        kind, answers = _coordinates(kind, answers)
    if gold_kind == kind == "atom":
        return _same_equation(golds[0], answers[0]) if "=" in gold + answer else _same_atom(golds[0], answers[0])
    if gold_kind != kind:
        # 2\begin{pmatrix}…, \mathbb{R}\setminus\{2\}
        computed = re.search(r"\\(?:setminus|backslash|cap|mathbb)|matrix\}", f"{gold} {answer}")
        return (
            bool(computed) and "atom" in (gold_kind, kind) and "=" not in gold + answer and _same_formula(gold, answer)
        )
    if len(golds) != len(answers):
        return False
    if kind in ("list", "union"):
        for part in golds:
            found = next((i for i, other in enumerate(answers) if same(part, other)), None)
            if found is None:
                return False
            answers = answers[:found] + answers[found + 1 :]
        return True
    return all(same(part, other) for part, other in zip(golds, answers, strict=True))


def _structure(text: str) -> tuple[str, list[str]]:
    """The kind of an answer (list, union, matrix with its number of rows, its pair of brackets, or atom), its parts."""
    text = re.sub(r"^\\\{[a-zA-Z](?:\\in ?\\mathbb\{R\})?(?:\\mid ?|:|\|)(.*)\\\}$", r"\1", text)
    found = re.fullmatch(rf"(?:{NAME.pattern})(=|\\in ?)((?:[(\[]|\\\{{|\\langle|\\mathbb|\\begin).*)", text)
    if found and (found[1] != "=" or _enclosed(found[2]) or found[2].endswith("matrix}")):  # not y=(x+1)(x-1)
        return _structure(found[2])
    if text == r"\mathbb{R}":
        text = r"(-\infty,\infty)"
    if found := re.fullmatch(r"[a-zA-Z]\\ne ?([^,]+)", text):
        return "union", [rf"(-\infty,{found[1]})", rf"({found[1]},\infty)"]
    if (found := MATRIX.fullmatch(text)) and found[1].count("\\begin") == 0:
        rows = [row for row in found[1].split("\\\\") if row]
        return f"matrix {len(rows)}", [cell for row in rows for cell in row.split("&")]
    if len(parts := _split(text, r"\cup")) > 1:
        return "union", parts
    if len(parts := _split(text, ",", ";", r"\or")) > 1:
        kind = "union" if r"\or" in text and all(map(_interval, parts)) else "list"
        return kind, [sign for part in parts for sign in _signs(part)]
    opening = _enclosed(text)
    if opening != r"\{" and len(parts := _signs(text)) > 1:
        return "list", parts
    if interval := _interval(text):
        return interval[:2]
    if opening in CLOSING:
        closing = next(end for end in (r"\rangle", r"\}", ")", "]", "}") if text.endswith(end))
        inside = text[len(opening) : -len(closing)]
        parts = _split(inside, ",", ";")
        if opening == r"\{":
            parts = [sign for part in parts for sign in _signs(part)]
            return ("list", parts) if len(parts) > 1 else _structure(inside)
        if opening == r"\langle":
            return f"matrix {len(parts)}", parts
        if len(parts) > 1:
            return opening + closing, parts
        if opening + closing in ("()", "{}"):
            return _structure(inside)
    return "atom", [text]


def _tokens(text: str) -> list[str]:
    return re.findall(r"\\[a-zA-Z]+|\\.|.", text)


def _split(text: str, *separators: str) -> list[str]:
    """The parts between separators that stand outside all brackets, among them those of (0,1] and [0,1)."""
    parts, depth = [""], 0
    for token in _tokens(text):
        depth += (token in CLOSING) - (token in CLOSING.values())
        if depth == 0 and token in separators:
            parts.append("")
        else:
            parts[-1] += token
    return [part.strip() for part in parts if part.strip()]


def _enclosed(text: str) -> str | None:
    """The bracket that opens at the start and closes at the end, if one does."""
    tokens, depth = _tokens(text), 0
    for position, token in enumerate(tokens):
        depth += (token in CLOSING) - (token in CLOSING.values())
        if depth == 0:
            return tokens[0] if 0 < position == len(tokens) - 1 else None
    return None


def _signs(text: str) -> list[str]:
    r"""Both values of `1\pm\sqrt{2}`."""
    if r"\pm" not in text:
        return [text]
    both = [text.replace(r"\pm", s).replace(r"\mp", o) for s, o in ("+-", "-+")]
    return [re.sub(r"(^|=)\+", r"\1", sign) for sign in both]


def _interval(text: str) -> tuple[str, list[str], str] | None:
    r"""`-1\le x<5` as the interval [-1,5) of x; None for what is no inequality in one variable."""
    tokens, sides, signs = _tokens(text), [""], []
    for token in tokens:
        if token in ("<", ">", r"\le", r"\ge"):
            signs.append(token)
            sides.append("")
        else:
            sides[-1] += token
    if len(signs) not in (1, 2) or len({s in (">", r"\ge") for s in signs}) > 1:
        return None
    sides = [side.strip() for side in sides]
    if signs[0] in (">", r"\ge"):
        sides, signs = sides[::-1], [{">": "<"}.get(sign, r"\le") for sign in signs[::-1]]
    if len(signs) == 1:
        variable = re.fullmatch(r"\\?[a-zA-Z]+", sides[0])
        sides, signs = ([r"-\infty", *sides], ["<", *signs]) if variable else ([*sides, r"\infty"], [*signs, "<"])
    if not re.fullmatch(r"[a-zA-Z]|\\(?!infty|pi)[a-z]+", sides[1]) or re.search(
        r"(?<![\\a-z])[a-z](?![a-z])", sides[0] + sides[2]
    ):
        return None
    return "[("[signs[0] == "<"] + "])"[signs[1] == "<"], [sides[0], sides[2]], sides[1]


def _coordinates(kind: str, parts: list[str]) -> tuple[str, list[str]]:
    """x=3, y=4 as (3,4)."""
    names = [part.partition("=")[0] for part in parts if NAME.fullmatch(part.partition("=")[0])]
    if kind == "list" and len(names) == len(parts) and names == sorted(set(names)):
        return "()", [part.partition("=")[2] for part in parts]
    return kind, parts


def _same_equation(gold: str, answer: str) -> bool:
    """x=5 and 5; y=2x+3 and 2x+3, or y-2x=3; but not x=5 and y=5."""
    golds, answers = _split(gold, "="), _split(answer, "=")
    if len(golds) > 1 and len(answers) > 1:
        if golds[0] == answers[0] and NAME.fullmatch(golds[0]):
            return same(golds[-1], answers[-1])
        return _same_formula(gold, answer)
    if len(golds) > 1:
        if not NAME.fullmatch(golds[0]):
            golds.reverse()
        return bool(NAME.fullmatch(golds[0])) and same(golds[-1], answer)
    if len(answers) > 1 and not NAME.fullmatch(answers[0]) and NAME.fullmatch(answers[-1]):
        answers.reverse()
    if len(answers) > 1 and not re.search("[a-zA-Z]", answers[0]) and not same(gold, answers[0]):
        return False  # 4+2=5
    # x+y=5 and 2+3=5 say 5; 3x+1=5 and an equation with 0 on its right side do not
    zero = answers[-1] == "0" and re.search(r"[a-z]", answers[0])
    unsolved = not NAME.fullmatch(answers[0]) and (zero or re.search(r"\d[a-z].*[+-]\d|^\d+[a-z]$", answers[0]))
    return len(answers) > 1 and not unsolved and same(gold, answers[-1])


def _same_atom(gold: str, answer: str) -> bool:
    if re.fullmatch("[A-F]", gold) and re.match(rf"\({gold}\)", answer):  # a choice with what it says
        return True
    if r"\text" in gold + answer or re.search(r"\d:[0-5]\d(?!\d)", gold):  # words, or a time of day
        return _words(gold) == _words(answer)
    if re.search(r"\d_\{", gold + answer):
        (digits, base), (other, other_base) = (
            found.groups() if (found := BASED.fullmatch(text)) else (text, None) for text in (gold, answer)
        )
        # the question names the base, so the answer may leave it out
        return digits == other and (other_base == base or other_base is None or (base, other_base) == (None, "10"))
    if "%" in gold + answer:
        gold_value, value = gold.replace("%", ""), answer.replace("%", "")
        if same(gold_value, value):
            return True
        hundredth = [rf"\frac{{{v}}}{{100}}" if "%" in t else v for t, v in ((gold, gold_value), (answer, value))]
        return ("%" in gold) != ("%" in answer) and same(*hundredth)
    return _same_formula(gold, answer)


def _words(text: str) -> str:
    """What is compared where words are: letters and digits, without case and spaces."""
    return re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).replace(" ", "").lower().strip(".()").removesuffix("s")


def _repeating(decimal: re.Match) -> str:
    r"""`1.\overline{3}` as `\frac{12}{9}`."""
    whole, once, period = decimal.groups()
    numerator = int(whole + once + period) - int(whole + once)
    return rf"\frac{{{numerator}}}{{{'9' * len(period)}{'0' * len(once)}}}"


def _same_formula(gold: str, answer: str) -> bool:
    from math_verify import LatexExtractionConfig, parse, verify

    parsed = []
    for text in (gold, answer):
        text = re.sub(r"(\d+)\.(\d*)\\overline\{(\d+)\}", _repeating, text)
        # exact fractions: floats would be compared after rounding
        text = re.sub(r"(\d+)\.(\d+)", lambda m: rf"\frac{{{int(m[1] + m[2])}}}{{1{'0' * len(m[2])}}}", text)
        text = re.sub(r"(\d+(?:\\frac\{\d+\}\{\d+\})?)\^\{\\circ\}", r"(\1\\cdot\\frac{\\pi}{180})", text)
        if r"\sum" not in text:  # math-verify takes i for a variable
            text = re.sub(r"(?<![a-zA-Z\\])i(?![a-zA-Z])", r"(\\sqrt{-1})", text)
        # no extraction of bare numbers: it would read the 5 in any formula that it cannot parse
        parsed.append(parse(f"${text}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None))
    return verify(*parsed, float_rounding=12, numeric_precision=30, timeout_seconds=None)


def main() -> None:
    """Answer lines `[gold, answer, seconds]` by `{"same": true or false, null for an error}` until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    logging.disable()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no reply
    _same_formula("1", "2")  # imports, and first-time costs, before the clock of the first question runs
    print(json.dumps({}), file=replies, flush=True)
    for line in sys.stdin:
        gold, answer, seconds = json.loads(line)
        signal.alarm(seconds)  # ends this process even if the one that asks has died
        try:
            verdict = same(gold, answer)
        except Exception:
            verdict = None
        signal.alarm(0)
        print(json.dumps({"same": verdict}), file=replies, flush=True)


if __name__ == "__main__":
    main()
