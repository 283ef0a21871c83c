"""Models of the Hugging Face hub: downloaded and compared with the hub's checksums, or taken from the cache.

In: a hub name. Out: a local folder.
"""

from __future__ import annotations

import time
from functools import cache
from hashlib import sha1
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivetune.data.hub import describe_limit, get_max_wait_seconds, restrict_waits
from fivetune.errors import FiveTuneEnvironmentError, ModelError
from fivetune.rundir.checksums import compute_sha256

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt"]
OFFLINE = (
    "A first try without a network: --model.path t5-nano, which is part of FiveTune. Or download "
    "the model where there is a network and give its folder in place of the name; HF_HOME sets the cache folder."
)


@cache  # a process asks the hub once, and all its parts read the same version of a model
def fetch_snapshot(name: str, revision: str | None, *, hint: str = "") -> Path:
    """Download the files of a model, or take those of the cache if the hub fails.

    Args:
        hint: a name that may be meant, for messages.

    Raises ModelError for a name that the hub cannot have, FiveTuneEnvironmentError if the hub refuses or fails and
    the cache does not hold the model, or if a file is not what the hub has.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError

    seconds = get_max_wait_seconds()
    with restrict_waits(seconds):
        try:
            info = HfApi().model_info(name, revision=revision, files_metadata=True)
        except HFValidationError:
            raise ModelError(f"{name}: neither a local folder nor a hub name (org/name).{hint}") from None
        except Exception as error:  # of the hub, of the network, of its library: each of another type
            if folder := find_cached_snapshot(name, revision):
                return folder
            raise FiveTuneEnvironmentError(_describe_failure(name, error, hint)) from None
        begun = time.time()  # files that are older were in the cache, and are not hashed again
        try:
            found = snapshot_download(name, revision=revision, allow_patterns=PATTERNS, etag_timeout=seconds)
        except Exception as error:
            raise FiveTuneEnvironmentError(
                f"{name}: the download was not finished: {_get_first_line(error)}.{describe_limit(error)} Start again: "
                f"what is there is kept. {OFFLINE}"
            ) from None
    folder = Path(found)
    _refuse_other_content(name, folder, info, since=begun)
    return folder


def find_cached_snapshot(name: str, revision: str | None = None) -> Path | None:
    """Find a model in the hub's cache; None if it is not there, or if the name cannot be one of the hub."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=PATTERNS, local_files_only=True))
    except (OSError, ValueError):
        return None


def _describe_failure(name: str, error: Exception, hint: str) -> str:
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError

    if isinstance(error, GatedRepoError):
        return (
            f"{name}: the model is gated: the hub gives it only to users who have accepted its terms. Accept them at "
            f"https://huggingface.co/{name}, then set the environment variable HF_TOKEN to your access token."
        )
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else 0
    if status == 429 or status >= 500:
        return f"{name}: not in the hub's cache, and the hub responds: {_get_first_line(error)}. Try later. {OFFLINE}"
    if status:
        return (
            f"{name}: the hub responds: {_get_first_line(error)}.{hint} Check the name, or log in for a gated or "
            "private model."
        )
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return (
            f"{name}: not in the hub's cache, and the hub's certificate is not trusted: {_get_first_line(error)}. If "
            f"it is of your network's proxy, set SSL_CERT_FILE to the proxy's certificates. {OFFLINE}"
        )
    return (
        f"{name}: no local folder of that name, not in the hub's cache, and the hub cannot be reached "
        f"({type(error).__name__}).{hint} {OFFLINE}"
    )


def _refuse_other_content(name: str, folder: Path, info: ModelInfo, *, since: float) -> None:
    """Raise FiveTuneEnvironmentError, and remove the file, if one that came since a time is not what the hub has."""
    if folder.name != info.sha:
        return
    for listed in info.siblings or ():
        path = folder / listed.rfilename
        if not path.is_file() or path.stat().st_mtime < since - 1 or _is_same(path, listed):
            continue
        path.resolve().unlink()
        path.unlink(missing_ok=True)
        raise FiveTuneEnvironmentError(
            f"{name}: {listed.rfilename} has another checksum than the hub's, and is removed from the cache: the "
            "download changed it. Start again; if it stays so, look at proxies and the disk."
        )


def _is_same(path: Path, listed: Any) -> bool:
    """Whether a file is what the hub lists; True if it lists no checksum."""
    # Large files have a SHA-256, the others Git's SHA-1 of a blob.
    if listed.lfs:
        return compute_sha256(path) == listed.lfs.sha256
    if listed.blob_id:
        content = path.read_bytes()
        return sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest() == listed.blob_id
    return True


def _get_first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
