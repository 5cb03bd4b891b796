"""Strings that tokenizers get wrong: the same ones on every run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

BLOCK = 0x400  # code points of which one string is taken, throughout all 17 planes
SURROGATES = range(0xD800, 0xE000)

SCRIPTS = (
    ("a", "z"),
    ("A", "Z"),
    ("à", "ÿ"),
    ("Ā", "ſ"),
    ("α", "ω"),
    ("а", "я"),
    ("א", "ת"),
    ("ا", "ي"),
    ("ऄ", "ह"),
    ("ก", "ฮ"),
    ("가", "힣"),
    ("あ", "ん"),
    ("ア", "ン"),
    ("一", "鿿"),
    ("０", "ｚ"),
    ("𐤀", "𐤕"),
    ("𠀀", "𠿿"),
    ("𝐀", "𝟿"),
)
TEXT = (
    "the of and to in is that it was for on are as with his they at be this from I have or by one had not but what all "
    "were when we there can an your which their said if do will each about how up out them then she many some "
    "so these would other into has more her two like him see time could no make than first been its who now "
    "don't I'm we'll they've HE'S it'S you’re Straße naïve façade Ελλάδα Москва 東京 ソウル"
)
WORDS = TEXT.split()
CODE = (
    "def f({a}, *{b}):\n    return {a}[{n}:] if {b} else None  # {w}\n",
    "for (int {a} = 0; {a} < {n}; ++{a}) {{ {b}(&{a}); }}\n",
    '\t\tif err != nil {{\n\t\t\treturn fmt.Errorf("{w}: %w", err)\n\t\t}}\n',
    "SELECT {a}, COUNT(*) FROM {b} WHERE {a} >= {n}.5e-{n};",
    "<div class=\"{a}\" data-{b}='{n}'>{w}</div>\r\n",
    '{{"{a}": [{n}, null, true], "{b}": "\\u00e9\\n{w}"}}',
    "$ {a} --{b}={n} 2>&1 | grep -vE '^{w}$' || exit $?\n",
    "\\frac{{{a}}}{{{n}}} \\sum_{{{b}=1}}^{{\\infty}} {w}",
    "fn {a}<'x, T: ?Sized>({b}: &'x mut T) -> Option<&'x [u{n}]> {{ {w}!() }}",
    "    @{a}\n        {b} :: {n}\n\n\n# {w}\n",
    "https://{a}.example/{b}?q={n}&r=%20{w}#frag",
    "{a}_{b}{n} {a}{b}{w} {a}.{b}.{n} {a}-{n}",
    "if(!{a}){{{b}+={n};}}//{w}",
)
PICTURES = "😀 👍 👍🏽 ❤️ ❤ ☃ ☃️ 👩‍👩‍👧‍👦 🏳️‍🌈 🏴󠁧󠁢󠁳󠁣󠁴󠁿 🇩🇪 🇩 1️⃣ #️⃣ 🧑🏿‍🚀 👨‍💻 🫠 🪿 ™️ ㊗️ 🀄 𓀀 🈂️ ⌚ 🕴🏼‍♂️"
EMOJI = PICTURES.split()
SPACES = " \t\n\r\v\f\x1c\x1f\x85\xa0\u1680\u2003\u2009\u2028\u2029\u202f\u3000\u200b\ufeff"
BROKEN = (
    "\ufffd",
    "\ufffe",
    "\uffff",
    "\U0001fffe",
    "\U0010ffff",
    "\\ud800",
    "&#xD800;",
    "%C0%AF",
    "\x80",
    "\xff",
    "Ã©",
    "â€™",
    "\ufeff",
    "\ufdd0",
    "\\x00",
    "<0x0A>",
    "<0xE2>",
    "Ġ",
    "Ċ",
    "▁",
    "\u0340",
    "\u0f73",
    "\u1100\u1161\u11a8",
    "\u2126",
    "\ufb01",
    "\u1e9b\u0323",
)
BIDI = "\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2069\u061c"


class Corpus:
    """specials: what a user could type to look like the model."""

    def __init__(self, specials: Sequence[str], seed: int = 6) -> None:
        self._specials, self._random = list(specials), random.Random(seed)

    def strings(self) -> list[str]:
        """Without repetition, mixed."""
        found = dict.fromkeys(["", *self._planes()])
        for make, count in self._kinds():
            found |= dict.fromkeys(make() for _ in range(count))
        strings = list(found)
        self._random.shuffle(strings)
        return strings

    def _kinds(self) -> Iterator[tuple[Callable[[], str], int]]:
        yield self._sentence, 400
        yield self._scripts, 800
        yield self._emoji, 350
        yield self._marks, 350
        yield self._code, 300
        yield self._control, 300
        yield self._spaces, 500
        yield self._broken, 350
        yield self._special, 650
        yield self._numbers, 350
        yield self._mixture, 250

    def _some(self, low: int, high: int) -> range:
        return range(self._random.randint(low, high))

    def _planes(self) -> Iterator[str]:
        for low in range(0, 0x110000, BLOCK):
            if low not in SURROGATES:
                yield "".join(map(chr, sorted(self._random.sample(range(low, low + BLOCK), 3))))

    def _sentence(self) -> str:
        words = [self._random.choice(WORDS) for _ in self._some(1, 9)]
        return (
            self._random.choice(["", " ", "  "])
            + " ".join(words)
            + self._random.choice([".", "?!", "...", "", "\n", " "])
        )

    def _word(self) -> str:
        first, last = self._random.choice(SCRIPTS)
        return "".join(chr(self._random.randint(ord(first), ord(last))) for _ in self._some(1, 6))

    def _scripts(self) -> str:
        return "".join(
            self._word() + self._random.choice(["", " ", ", ", "—", "'s ", "。", "\n", "-", "1"])
            for _ in self._some(1, 5)
        )

    def _emoji(self) -> str:
        return "".join(
            self._random.choice(EMOJI) + self._random.choice(["", " ", "\u200d", "\ufe0f", "a", "!"])
            for _ in self._some(1, 4)
        )

    def _marks(self) -> str:
        bases = "aeoAÅnśक한ا" + self._random.choice(BIDI)
        marks = [*range(0x300, 0x370), *range(0x1AB0, 0x1ABF), *range(0x20D0, 0x20E0), 0x64B, 0x93C, 0x3099, 0xFE20]
        return "".join(
            self._random.choice(bases) + "".join(chr(self._random.choice(marks)) for _ in self._some(0, 4))
            for _ in self._some(1, 4)
        )

    def _code(self) -> str:
        names = [
            self._random.choice(["x", "i", "foo", "HTTPServer", "snake_case", "λ", "__init__", "größe"]) for _ in "ab"
        ]
        values = {"a": names[0], "b": names[1], "n": self._random.randint(0, 5000), "w": self._random.choice(WORDS)}
        return self._random.choice(CODE).format(**values)

    def _control(self) -> str:
        codes = [*range(0x20), 0x7F, *range(0x80, 0xA0)]
        return "".join(
            chr(self._random.choice(codes)) + self._random.choice(["", "", "a", " b", "1"]) for _ in self._some(1, 10)
        )

    def _spaces(self) -> str:
        runs = (self._random.choice(SPACES) * self._random.choice([1, 1, 2, 3, 8, 40, 150]) for _ in self._some(1, 4))
        return "".join(run + self._random.choice(["", "", "word", "'t", "7", "!"]) for run in runs)

    def _broken(self) -> str:
        return "".join(
            self._random.choice(BROKEN) + self._random.choice(["", " ", "a", "\n"]) for _ in self._some(1, 6)
        )

    def _special(self) -> str:
        """Special tokens: whole, cut, doubled, one inside the other, in sentences."""
        name = self._random.choice(self._specials)
        cut = self._random.randint(1, len(name))
        other = self._random.choice(self._specials)
        shape = self._random.choice(
            [
                "{n}",
                "{h}",
                "{t}",
                "{n}{n}",
                "{h}{n}{t}",
                "{h}{o}{t}",
                " {n} ",
                "{w}{n}{w}",
                "{n}\n{o}{w}",
                "{u}",
                "<{n}>",
            ]
        )
        return shape.format(n=name, h=name[:cut], t=name[cut:], o=other, w=self._random.choice(WORDS), u=name.upper())

    def _numbers(self) -> str:
        digits = self._random.choice(
            ["0123456789", "٠١٢٣٤٥٦٧٨٩", "०१२३४५६७८९", "０１２３４５６７８９", "²³¹⁴", "½¾Ⅷↈ", "𝟎𝟏𝟐𝟑"]
        )
        return "".join(
            "".join(self._random.choice(digits) for _ in self._some(1, 9))
            + self._random.choice(["", ".", ",", " ", "e", "%", "$", "'ll", "'LL"])
            for _ in self._some(1, 5)
        )

    def _mixture(self) -> str:
        makers = [make for make, _ in self._kinds() if make != self._mixture]
        return "".join(self._random.choice(makers)()[:30] for _ in self._some(2, 4))
