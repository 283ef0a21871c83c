"""Convert posts of Stack Overflow to inputs: strip the markup, fill the template.

In: a record with text columns of a post. Out: the filled template.
"""

from __future__ import annotations

import re
from html import unescape

from fivetune.tasks import fill_template, get_text, list_template_columns
from fivetune.types import RawRecord

_MARKUP = re.compile(
    r"</?(?:a|b|blockquote|br|code|dd|del|div|dl|dt|em|h[1-6]|hr|i|img|kbd|li|ol|p|pre|s|span|strike|strong|sub|sup|"
    r"table|tbody|td|th|thead|tr|ul)(?:\s+[\w-]+(?:=(?:\"[^\"]*\"|'[^']*'))?)*\s*/?>",
    re.IGNORECASE,
)


def strip_markup(text: str) -> str:
    """Remove Stack Overflow's HTML tags, resolve entities and collapse white space; code such as `a<b` stays.

    >>> strip_markup("<p>Is <code>a&lt;b</code> <a href='x.html'>so</a>?</p> vector<int> a; a<b && c>d")
    'Is a<b so ? vector<int> a; a<b && c>d'
    """
    return " ".join(unescape(_MARKUP.sub(" ", text)).split())


def fill_post_template(record: RawRecord, template: str, *, markup: bool) -> tuple[str, tuple[int, int]]:
    """Fill a template from the text columns of a post; return the inputs and their clippable span.

    All of the inputs is clippable, so that `head_tail` keeps the start and the end of the whole text.
    """
    values = {name: get_text(record, name) for name in list_template_columns(template)}
    if not markup:
        values = {name: strip_markup(value) for name, value in values.items()}
    inputs, _ = fill_template(template, values)
    return inputs, (0, len(inputs))
