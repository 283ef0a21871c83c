"""Redaction of secrets: access tokens, passwords in URLs, values of settings named like a secret.

In: any text or JSON value that FiveTune writes or prints. Out: the same with `(hidden)` in place of each secret.
Applied to all output: errors, the terminal and log.txt, config.yaml, machine.json, status.json, pages, model cards,
trackers. Data is exempt: predictions are written as the model generated them.
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
# `--x.api_key VALUE`, `WANDB_API_KEY=VALUE`, `api_key: VALUE`, `"api_key": "VALUE"`
_ASSIGNMENT = re.compile(
    rf"((?:--[\w.-]*(?:{_SECRET_NAME})[\s=]+|[\w.-]*(?:{_SECRET_NAME})[\"']?\s*[=:]\s*)[\"']?)"
    r"(?!null\b|None\b|true\b|false\b|\(hidden\)|[\"'])[^\s\"',;&}]+",
    re.IGNORECASE,
)
_BEARER = re.compile(r"(\bBearer\s+)[\w.~+/-]{12,}=*", re.IGNORECASE)
_KEY = re.compile(rf"(?:^|[._-])(?:{_SECRET_NAME}|token)$", re.IGNORECASE)


def redact_secrets(text: str) -> str:
    """Replace tokens, passwords in URLs, and values assigned to the name of a secret by `(hidden)`.

    >>> redact_secrets("https://me:pw@host/x.json with hf_abcdefghijklmnopqrstuvwx")
    'https://(hidden)@host/x.json with (hidden)'
    >>> redact_secrets("fivetune train r.yaml --search.api_key 1234 WANDB_API_KEY=5678 --optimizer.lr 1e-3")
    'fivetune train r.yaml --search.api_key (hidden) WANDB_API_KEY=(hidden) --optimizer.lr 1e-3'
    """
    text = _TOKENS.sub(HIDDEN, text)
    text = _URL_CREDENTIALS.sub(HIDDEN, text)
    text = _ASSIGNMENT.sub(rf"\g<1>{HIDDEN}", text)
    return _BEARER.sub(rf"\g<1>{HIDDEN}", text)


def is_secret_name(name: str) -> bool:
    """Whether a dotted setting name denotes a secret.

    >>> is_secret_name("sinks.wandb.api_key"), is_secret_name("eval.max_new_tokens")
    (True, False)
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
