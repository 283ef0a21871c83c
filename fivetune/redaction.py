"""Redaction of secrets: access tokens, passwords in URLs, values of settings named like a secret; invisible characters.

In: any text or JSON value that FiveTune writes or prints. Out: the same with `(hidden)` in place of each secret.
Applied to all output: errors, the terminal and log.txt, config.yaml, machine.json, status.json, pages, model cards,
trackers. Data is exempt: predictions are written as the model generated them. In config.yaml and in recipes, which a
run reads back, in model cards and for trackers, labels, templates and columns are exempt too.
"""

from __future__ import annotations

import re
from typing import Any

HIDDEN = "(hidden)"
_TOKENS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|sk-[\w-]{8,}|gh[oprsu]_[A-Za-z0-9]{8,}|github_pat_\w{8,}|glpat-[\w-]{8,}"
    r"|AKIA[A-Z0-9]{8,}|AIza[\w-]{30,}|xox[abprs]-[\w-]{8,}|wandb_v\d_\w{8,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,})"
)
_URL_CREDENTIALS = re.compile(r"(?<=://)[^/@\s:'\"]*:[^/@\s'\"]+(?=@)")
_SECRET_NAME = (
    r"(?:api|access|secret|private|wandb)[_-]?key|(?:api|access|auth|hf|hub|wandb|bearer|secret)[_-]?token"
    r"|password|passwd|passphrase|credentials?|client[_-]?secret|secret"
)
# The lookbehind admits one start per word; without it the time is quadratic in the length of a word.
_NAME = rf"(?<![\w.-])[\w.-]*(?:{_SECRET_NAME})"
_NO_SECRET = r"(?![\"']?(?:null|None|true|false|\(hidden\))"
_QUOTED = r"(?P<quote>[\"'])(?:\\.|(?!(?P=quote)).)+(?P=quote)"
# `--x.api_key VALUE`, `WANDB_API_KEY=VALUE`: an unquoted value is one word.
_ARGUMENT = re.compile(
    rf"((?:(?<![\w.-])--[\w.-]*(?:{_SECRET_NAME})\s+|{_NAME}[\"']?\s*=\s*)){_NO_SECRET}(?:[\s\"',;&}}.]|$))"
    rf"(?:{_QUOTED}|(?P<open>[\"']?)[^\s\"',;&}}]+)",
    re.IGNORECASE,
)
# `api_key: VALUE`, `"api_key": "VALUE"`: an unquoted value is the rest of the clause, as a passphrase has many words.
_ENTRY = re.compile(
    rf"({_NAME}[\"']?\s*:\s*){_NO_SECRET}(?:[\n\"',;&}}.]|$))"
    rf"(?:{_QUOTED}|(?P<open>[\"']?)(?=[^\s\"',;&}}])(?:(?!\.\s)[^\"',;&}}\n]|'(?=\w))+)",
    re.IGNORECASE,
)
_BEARER = re.compile(r"(\bBearer\s+)[\w.~+/-]{12,}=*", re.IGNORECASE)
_SPECIAL = "".join(f"(?<!{name}_)" for name in ("bos", "eos", "pad", "unk", "sep", "cls", "mask"))  # of a vocabulary
_KEY = re.compile(rf"(?:^|[._-])(?:{_SECRET_NAME}|{_SPECIAL}token)$", re.IGNORECASE)
_EXEMPT_SETTING = re.compile(r"(?:search\.over\.)?(?:task|data\.columns)(?:\.|$)")


# Controls, directions, invisible characters, surrogates and private use: they can make one text look like another. Not
# U+200C and U+200D, which emoji and several scripts need, and not U+180E, which Mongolian needs.
INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\ue000-\uf8ff\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e007f\U000f0000-\U0010ffff]"
)


def name_invisible(text: str) -> str:
    r"""Name the characters that a terminal or browser does not show as such (INVISIBLE).

    >>> name_invisible("a\u202eb\x1b[2J\n")
    'a[U+202E]b[U+001B][2J\n'
    """
    return INVISIBLE.sub(lambda match: f"[U+{ord(match.group()):04X}]", text)


def redact_secrets(text: str) -> str:
    """Replace tokens, passwords in URLs, and values assigned to the name of a secret by `(hidden)`.

    >>> redact_secrets("https://me:pw@host/x.json with hf_abcdefghijklmnopqrstuvwx")
    'https://(hidden)@host/x.json with (hidden)'
    >>> redact_secrets("fivetune train r.yaml --search.api_key 1234 WANDB_API_KEY=5678 --optimizer.lr 1e-3")
    'fivetune train r.yaml --search.api_key (hidden) WANDB_API_KEY=(hidden) --optimizer.lr 1e-3'
    """
    text = hide_tokens(text)
    for form in (_ARGUMENT, _ENTRY):
        text = form.sub(rf"\g<1>\g<quote>\g<open>{HIDDEN}\g<quote>", text)
    return _BEARER.sub(rf"\g<1>{HIDDEN}", text)


def hide_tokens(text: str) -> str:
    """Replace tokens and passwords in URLs, which are recognised by their form alone."""
    return _URL_CREDENTIALS.sub(HIDDEN, _TOKENS.sub(HIDDEN, text))


def redact_settings(value: Any, name: str = "") -> Any:
    """Replace tokens, passwords in URLs and the values of settings named like a secret in a table of settings.

    A run reads these settings back, so labels, templates and columns (`task`, `data.columns`) are unchanged, and no
    text but the title of the report is searched for `name: value`.

    Args:
        value: settings, nested or by dotted names.
        name: dotted name of the setting that has this value.

    >>> redact_settings({"task": {"labels": {"password": "reset"}}, "sink": {"api_key": "1234"}, "run.dir": "runs/a"})
    {'task': {'labels': {'password': 'reset'}}, 'sink': {'api_key': '(hidden)'}, 'run.dir': 'runs/a'}
    """
    if _EXEMPT_SETTING.match(name):
        return value
    if isinstance(value, dict):
        return {key: redact_settings(item, f"{name}.{key}" if name else str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact_settings(item, name) for item in value]
    if not isinstance(value, str):
        return value
    if name == "report.title":
        return redact_secrets(value)
    return HIDDEN if value and is_secret_name(name) else hide_tokens(value)


def is_secret_name(name: str) -> bool:
    """Whether a dotted setting name denotes a secret.

    >>> is_secret_name("sinks.wandb.api_key"), is_secret_name("eval.max_new_tokens"), is_secret_name("bos_token")
    (True, False, False)
    """
    return _KEY.search(name) is not None


def redact_json(value: Any) -> Any:
    """Apply `redact_secrets` to every string of a JSON value; hide strings under the name of a secret entirely.

    >>> redact_json({"api_key": "1234", "command": ["curl", "hf_abcdefghijklmnopqrstuvwx"], "seed": 1})
    {'api_key': '(hidden)', 'command': ['curl', '(hidden)'], 'seed': 1}
    """
    if isinstance(value, dict):
        return {
            key: HIDDEN if isinstance(item, str) and item and is_secret_name(str(key)) else redact_json(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact_json(item) for item in value]
    return redact_secrets(value) if isinstance(value, str) else value
