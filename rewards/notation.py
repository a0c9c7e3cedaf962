r"""Notations of answers in plain text and LaTeX: the values of numbers, times, sentences and lists.

A number may have signs (`-`, `minus`), a currency, thousands separators, decimals, a fraction, an exponent (`1.5e3`,
`1.5 \times 10^3`), percent, and a unit. What calculates, such as `2 pi`, `5 million` or `20x`, is not a number.
"""

import re
import unicodedata
from fractions import Fraction

LONGEST = 200
"""Characters of the longest number with its unit, sentence or list."""
# scripts whose words touch numbers: Thai, Lao, Burmese, Khmer, kana, Chinese characters, Hangul
UNSPACED = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u30ff\u3400-\u9fff\uac00-\ud7a3\uf900-\ufaff"
BEGIN, END = rf"(?<![^\W{UNSPACED}])", rf"(?![^\W{UNSPACED}])"
"""The edges of a word of other scripts."""
DIGITS = r"(?:\d{1,3}(?:[, _']\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
EXPONENT = r"\^\{?([-+]?\d{1,3})\}?"
POWER = rf"(?:[eE]([-+]?\d{{1,3}})(?!\d)|\s*(?:[x*×·]|\\times|\\cdot)\s*10{EXPONENT}|{EXPONENT})"
FRACTION = r"(?:(\d+) +)?(\d+) ?/ ?(\d+)"
CURRENCY = r"(?:(?:USD|EUR|GBP|JPY|CNY|RMB|INR|CHF|US|HK|Rs\.?)?\s?\$?\s?)"
CLOCK = r"(\d{1,2})\s?[:時时點点시]\s?(\d{2})(?!\d)(?:\s?[:分분]\s?(\d{2})?)?"
NUMBER = re.compile(
    rf"(?=[-+$.\d]){BEGIN}(?<![.^])(?<!\^[-+{{])(?<!\^\{{[-+])[-+]?\$?[-+]?"
    rf"(?:{CLOCK}(?:\s*[aApP]\.?[mM]\b\.?)?|\d+(?::\d+)+|{FRACTION}|(?:{DIGITS}){POWER}?)(?:\s*%)?"
)
"""A number or a time within a text, not an exponent."""
MINUS = re.compile(
    r"(?P<operand>(?:[\d%)\]}$°]|\b[^\W\d_])\s*)?(?:-\s+|\b(?:minus|negative)\s+|[负負]|マイナス)\Z", re.I
)
"""A minus before a number that it does not touch; with an operand before it, it subtracts."""
CALCULATES = (
    r"(?:pi|plus|minus|times|over|or|and|by|to|squared|cubed|halves|thirds|tenths|"
    r"(?:hundred|thousand|dozen|lakh|crore)s?|(?:mill|bill|trill)i?on\w*)\b"
)
SHORT = (
    r"(?-i:[kcdmnµμ]?m|[kmµμ]?g|[mcd]?[lL]|hr?s?|mins?|m?s|secs?|ft|in|yds?|mi|lbs?|oz|mph|kph|kW|kWh|[kMG]?Hz|[MGTk]B)"
)
WORD = rf"(?:(?!{CALCULATES})[^\W\d_{UNSPACED}]{{2,}})"
LONG = rf"(?:(?!{CALCULATES}|sin|cos|tan|log|sqrt|exp)[a-z]{{4,}})"
SCALE = "(?!千[克米瓦卡])[万萬億亿兆千百十拾割成倍半만억천백]"
COUNTER = rf"(?:(?!{SCALE}|[之点點又和或與与])[{UNSPACED}]){{1,8}}"
NAME = rf"(?:\s?{SHORT}{END}|\s{WORD}|{LONG}|\s?°\s?(?:[CFK]\b)?)(?:\s?\^\{{?-?\d\}}?)?"
UNIT = rf"(?:{NAME}(?:\s?/\s?(?:{SHORT}{END}|{WORD})(?:\s?\^\{{?-?\d\}}?)?)?|\s?{COUNTER}){{0,3}}"
"""Up to three words."""
WITH_UNIT = re.compile(
    rf"([-+]|minus\s|negative\s|[负負]|マイナス)?\s*{CURRENCY}([-+]?)(?:{FRACTION}|({DIGITS}){POWER}?)"
    rf"\s*(%|per ?cent\b|pct\b)?\s?\$?{UNIT}[.,;!。]*",
    re.IGNORECASE,
)
TIME = re.compile(rf"{CLOCK}(?:\s*([ap])\.?\s?m\b\.?)?[.,;!。]*", re.IGNORECASE)
LATEX = [
    (re.compile(r"\\(?:text|math)(?:rm|bf|it|sf)?\s*\{([^{}]*)\}|\\mbox\s*\{([^{}]*)\}"), r" \1\2 "),
    (re.compile(r"\s*(?:\\[,;: ]|\\q?quad\b|~)\s*"), " "),
    (re.compile(r"\\!|\\displaystyle\b"), ""),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\([$%])"), r"\1"),
    (re.compile(r"\s*\^\s*\{?\s*\\circ\b\s*\}?|\\degree\b"), "°"),
    (re.compile(r"(?<=\d)\s*(?=\\[dtc]?frac)"), " "),
    (re.compile(r"\\[dtc]?frac\s*(?:\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}|(\d)\s*(\d))"), r"\1\3/\2\4"),
]
"""LaTeX around numbers, and its replacement."""
LABEL = re.compile(rf"\W*(?!answer|result|total|sum)第?[^\W\d{UNSPACED}]*\s*\d+\s*(?:[.):–—-](?!\d)|\Z)", re.IGNORECASE)
"""The beginning of a heading: `Step 2`, `2. Setup`."""
ALTERNATIVES = re.compile(r"\b(?:or|nor|not|neither|either)\b|n't\b|[或]", re.IGNORECASE)
WORDS = re.compile(rf"[^\W\d_]{{2,}}|[{UNSPACED}]")
CALCULATED = re.compile(
    rf"(?!{UNIT}(?:[\s.,;:!?)。、，]|\Z|[{UNSPACED}]))|\s*(?:[-+*/^×=<>(]|{SCALE}|[b-hj-zπ]\b|{CALCULATES})", re.I
)
HALF = re.compile(
    r"\b(?:plus|times|over|than|least|most|twice|double|(?:half|third|quarter|fifth|out) of)\s\W*\Z", re.I
)
"""Words of a calculation behind a number and before it."""
SEPARATOR = re.compile(r"\s*(?:,?\s*\b(?:and|or)\b|;|,\s|,(?!\d{3}(?!\d)))\s*")


def plain(text: str) -> str:
    """Return text with digits, signs, fractions, currencies, exponents and spaces of other scripts in ASCII.

    A number in LaTeX, and text within LaTeX, becomes plain text.
    """
    if not text.isascii():
        text = re.sub(r"(?<=\s)[–‒](?=\s)", "—", text)  # no minus
        text = re.sub("[⁰¹²³⁴-⁹⁻]+", lambda power: "^" + unicodedata.normalize("NFKC", power[0]), text)
        text = "".join(map(_plain_letter, text))
    before = None if "\\" in text or "{,}" in text else text
    while text != before:  # what one replacement leaves may be the beginning of another
        before = text
        for pattern, replacement in LATEX:
            text = pattern.sub(replacement, text)
    return text


def _plain_letter(letter: str) -> str:
    if letter in "\u2212\u2012\u2013\ufe63\uff0d":
        return "-"
    if unicodedata.decomposition(letter).startswith("<fraction>"):  # 3½ is 3 1/2, not 31/2
        return " " + unicodedata.normalize("NFKC", letter).replace("\u2044", "/")
    category = unicodedata.category(letter)
    if category in ("Zs", "Sc"):
        return " " if category == "Zs" else "$"
    return {"٫": ".", "٬": ",", "⁄": "/", "％": "%", "：": ":", "．": ".", "＝": "=", "＋": "+"}.get(letter) or str(
        unicodedata.decimal(letter, letter)
    )


def bare(answer: str) -> str:
    """Return an answer in plain text, without the delimiters of mathematics, emphasis, and an equals sign before it."""
    text = plain(answer).strip()
    text = re.sub(r"\A(?:\$\$?|\\[(\[])(.*?)(?:\$\$?|\\[)\]])([.,]?)\Z", r"\1\2", text, flags=re.DOTALL)
    text = re.sub(r"(?<!\w)(\*\*?|__?|`)(.+?)\1(?!\w)", r"\2", text)
    return " ".join(text.strip(" *_`").lstrip(" =:").split())


def numbers(answer: str) -> tuple[Fraction, ...]:
    """Return the values that an answer may mean; none if it is not a single number. 50 % may be 50 or 1/2."""
    if len(answer) > LONGEST or not (match := WITH_UNIT.fullmatch(bare(answer))):
        return ()
    sign, inner_sign, integer, above, below, decimal, e, ten, power, percent = match.groups()
    if decimal:
        value = Fraction(re.sub("[, _']", "", decimal))
    elif int(below):
        value = int(integer or 0) + Fraction(int(above), int(below))
    else:
        return ()
    if power and not value:
        return ()
    value = (value ** int(power) if power else value) * Fraction(10) ** int(e or ten or 0)
    if (sign or "+") != "+" or inner_sign == "-":
        value = -value
    return (value, value / 100) if percent else (value,)


def time_of(answer: str) -> tuple[int, ...]:
    """Return hour, minute and second of a time of day such as `10:30 a.m.`; nothing for other answers."""
    if len(answer) > LONGEST or not (match := TIME.fullmatch(bare(answer))):
        return ()
    hour, minute, second, half = match.groups()
    return (int(hour) % 12 + 12 * (half in "pP") if half else int(hour), int(minute), int(second or 0))


def signed(number: re.Match[str]) -> str:
    """Return a number or time in plain text, a match of `NUMBER`, with a sign that it does not touch."""
    before = number.string[max(0, number.start() - 20) : number.start()]
    minus, bullet = MINUS.search(before), "\n" in before and before.rpartition("\n")[2].strip() == "-"
    return "-" + number[0] if minus and not minus["operand"] and not bullet else number[0]


def stated(answer: str) -> str:
    """Return the only number or time of a sentence; empty if there are others, alternatives, or calculations."""
    text = bare(answer)
    if len(answer) > LONGEST or LABEL.match(text) or ALTERNATIVES.search(text) or not WORDS.search(text):
        return ""
    matches = list(NUMBER.finditer(text))
    values = {numbers(number) or time_of(number) or number for number in map(signed, matches)}
    others = re.search(r"\d", NUMBER.sub("", text))
    calculated = any(CALCULATED.match(text, number.end()) or HALF.search(text[: number.start()]) for number in matches)
    return signed(matches[0]) if len(values) == 1 and not others and not calculated else ""


def items(answer: str) -> list[str]:
    """Return the members of a list such as `2, 3`, `[2, 3]`, `2 and 3`; the answer itself if it is no list."""
    text = bare(answer)
    text = re.sub(r"\A(?:\[|\\?\{)(.*?)(?:\]|\\?\})\Z", r"\1", text)
    if len(answer) > LONGEST:
        return [text]
    members, start = [], 0
    for separator in SEPARATOR.finditer(text):
        before = text[: separator.start()]
        if all(before.count(a) == before.count(b) for a, b in ("()", "[]", "{}")):
            members.append(text[start : separator.start()])
            start = separator.end()
    return [*members, text[start:]]
