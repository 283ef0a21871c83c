"""The upload of a run to a model hub.

In: a repository's name and its files. Out: one commit, or an error that says what to do. The token comes from HF_TOKEN
alone, the address of the hub from HF_ENDPOINT.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from fivetune.data.hub import get_max_wait_seconds, restrict_waits
from fivetune.delivery.hub.files import RepoFile
from fivetune.errors import ConfigError, FiveTuneEnvironmentError, FiveTuneError

TOKEN = "HF_TOKEN"
ENDPOINT = "HF_ENDPOINT"
PUBLIC_HUB = "https://huggingface.co"
MAX_WAIT_SECONDS = 60.0  # for an answer: a commit may take the hub a while
SAFE = "The same command again is safe: files that have arrived are not sent twice."
AGAIN = f"Nothing was published. {SAFE}"
MAX_REASON_CHARS = 300
REFUSALS = {
    401: f"the hub does not accept the token in {TOKEN} (401). It is wrong, expired or revoked: create another with "
    f"write access at {PUBLIC_HUB}/settings/tokens.",
    403: f"the token in {TOKEN} has no write access to {{owner}} (403). Take one that has it, or a name under your "
    "own account.",
    404: "the hub finds no {owner}, or the token does not see it (404). Check the name.",
    409: "the hub reports a conflict (409): another upload to it is running. Wait for that one.",
    429: "the hub takes no more requests now (429). Wait some minutes.",
}
"""Status code of the hub's answer -> what it means and what to do; `owner` is the organisation of the repository."""


def refuse_repo_name(name: str) -> None:
    """Raise ConfigError for a name that is not org/name."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    form = "Give the name of your account or organisation and of the model, such as me/t5-squad."
    if name.count("/") != 1:
        raise ConfigError(f"{name}: is not a repository name (org/name). {form}")
    try:
        validate_repo_id(name)
    except HFValidationError:
        raise ConfigError(
            f"{name}: is not a repository name. Allowed: letters, digits, '-', '_' and '.', at most 96, no '--' or "
            f"'..', none of '-' and '.' at the ends. {form}"
        ) from None


def read_token() -> str:
    """Read the access token from the environment. Raises FiveTuneEnvironmentError without one."""
    token = os.environ.get(TOKEN, "").strip()
    if not token:
        raise FiveTuneEnvironmentError(
            f"the hub needs an access token, and the environment variable {TOKEN} is not set. Create a token with "
            f"write access at {PUBLIC_HUB}/settings/tokens, set {TOKEN} to it, and push again; --dry-run needs none."
        )
    if not token.isascii() or re.search(r"\s", token):
        raise FiveTuneEnvironmentError(
            f"the environment variable {TOKEN} has characters that no token has, such as spaces. Set it to "
            "the token alone."
        )
    return token


def get_endpoint() -> str:
    """Return the address of the hub."""
    return (os.environ.get(ENDPOINT) or PUBLIC_HUB).rstrip("/")


def upload_files(repo: str, files: Sequence[RepoFile], *, token: str, private: bool, message: str) -> None:
    """Create the repository if it does not exist, and upload the files in one commit.

    Args:
        private: create it as private; an existing public one is refused.

    Raises FiveTuneEnvironmentError if the hub refuses, cannot be reached, or does not answer for MAX_WAIT_SECONDS (or
    HF_HUB_DOWNLOAD_TIMEOUT). After a failed upload nothing is visible; if the answer to the commit was
    lost, the repository has all files or none.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import (
        HTTPError,  # pyright: ignore[reportPrivateImportUsage]  # of httpx or httpx2, by the version of the hub
        OfflineModeIsEnabled,
    )

    api = HfApi(endpoint=get_endpoint(), token=token)
    doing = "creating the repository"
    seconds = get_max_wait_seconds(MAX_WAIT_SECONDS)
    operations = [
        CommitOperationAdd(file.name, file.content if isinstance(file.content, bytes) else str(file.content))
        for file in files
    ]
    try:
        with restrict_waits(seconds), _suppress_bars():
            api.create_repo(repo, private=private or None, exist_ok=True)
            if private and api.repo_info(repo).private is False:
                raise FiveTuneEnvironmentError(
                    f"{repo}: exists and is public, and --private was given. Nothing was published. Make it private "
                    "in its settings on the hub, or give another name."
                )
            doing = "uploading"
            api.preupload_lfs_files(repo, operations)
            doing = "committing"
            api.create_commit(repo, operations, commit_message=message)
    except OfflineModeIsEnabled:
        raise FiveTuneEnvironmentError(
            f"{repo}: HF_HUB_OFFLINE is set, so that the hub is never asked. Unset it, and push again."
        ) from None
    except FiveTuneError:
        raise
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        if refusal := _explain_refusal(error, repo, doing):
            raise refusal from None
        # A commit whose answer is lost may have been made.
        again = f"See {get_endpoint()}/{repo}: it may be published. {SAFE}" if doing == "committing" else AGAIN
        raise FiveTuneEnvironmentError(
            f"{repo}: {get_endpoint()} cannot be reached, did not answer for {seconds:g} seconds, or the connection "
            f"was lost while {doing} ({type(error).__name__}: {_shorten(str(error), token)}). {again}"
        ) from None


@contextmanager
def _suppress_bars() -> Generator[None]:
    """Show no progress bars of the upload outside a terminal: they would fill a log."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if sys.stderr.isatty() or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _explain_refusal(error: BaseException, repo: str, doing: str) -> FiveTuneEnvironmentError | None:
    """Translate the hub's answer that caused an error into what the user can do; None if there was no answer."""
    from huggingface_hub.errors import HfHubHTTPError

    cause: BaseException | None = error
    while not isinstance(cause, HfHubHTTPError):
        if cause is None:
            return None
        cause = cause.__cause__
    status = cause.response.status_code
    text = REFUSALS.get(status, "the hub answers with {status} while {doing}: {reason}.")
    reason = _shorten(cause.server_message or str(cause), "").rstrip(".")
    told = text.format(status=status, doing=doing, reason=reason, owner=repo.partition("/")[0])
    return FiveTuneEnvironmentError(f"{repo}: {told} {AGAIN}")


def _shorten(text: str, token: str) -> str:
    """Return the first line of a text without the token."""
    line = next(iter(text.strip().splitlines()), "no reason is given")
    return (line.replace(token, "(hidden)") if token else line)[:MAX_REASON_CHARS]
