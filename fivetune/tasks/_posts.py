"""Posts of Stack Overflow: text without markup, and the inputs made of it.

In: a record with text columns of a post. Out: the filled template.
"""

from __future__ import annotations

import re
from html import unescape

from fivetune.tasks import fill, template_columns, text_column
from fivetune.types import RawRecord

_MARKUP = re.compile(
    r"</?(?:a|b|blockquote|br|code|dd|del|div|dl|dt|em|h[1-6]|hr|i|img|kbd|li|ol|p|pre|s|span|strike|strong|sub|sup|"
    r"table|tbody|td|th|thead|tr|ul)(?:\s+[\w-]+(?:=(?:\"[^\"]*\"|'[^']*'))?)*\s*/?>",
    re.IGNORECASE,
)


def plain_text(text: str) -> str:
    """A post without the tags that Stack Overflow writes, entities resolved, space squeezed; code in it stays.

    >>> plain_text("<p>Is <code>a&lt;b</code> <a href='x.html'>so</a>?</p> vector<int> a; a<b && c>d")
    'Is a<b so ? vector<int> a; a<b && c>d'
    """
    return " ".join(unescape(_MARKUP.sub(" ", text)).split())


def post_inputs(record: RawRecord, template: str, *, markup: bool) -> tuple[str, tuple[int, int]]:
    """Fill a template from the text columns of a post; all of it may be cut, so that head and tail are those of all."""
    values = {name: text_column(record, name) for name in template_columns(template)}
    if not markup:
        values = {name: plain_text(value) for name, value in values.items()}
    inputs, _ = fill(template, values)
    return inputs, (0, len(inputs))
