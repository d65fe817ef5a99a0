"""A model from the Hugging Face Hub, through huggingface_hub and its cache; its failures in one sentence
each."""

from __future__ import annotations

from pathlib import Path

from linearize.checkpoint import TRAVELS
from linearize.errors import LinearizeError, ModelError, NetworkError, ResourceError, UsageError, first_line

# Only what a conversion reads: no pickles, no GGUF, no second copy of the weights in another format or folder.
WANTED = ["*.safetensors", *TRAVELS]
UNWANTED = [
    "consolidated*.safetensors",
    "model.*.safetensors",
    *(f"*/{pattern}" for pattern in WANTED if not pattern.endswith(".jinja")),
]


def download(repo_id: str, revision: str | None = None) -> Path:
    """The local snapshot of a Hub model, downloaded where it isn't in the cache yet.

    HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE mean what they mean to huggingface_hub.

    Raises:
        NetworkError: no such repository or revision, a gated one, no connection, or offline without a cached
            copy.
        UsageError: `repo_id` can't be a Hub id.
    """
    import huggingface_hub
    from huggingface_hub import errors

    # httpx's base class (huggingface_hub changes the package that it comes from between its versions).
    http_error = getattr(errors, "HTTPError", errors.HfHubHTTPError)
    try:
        folder = huggingface_hub.snapshot_download(
            repo_id, revision=revision, allow_patterns=WANTED, ignore_patterns=UNWANTED
        )
    except errors.HFValidationError as error:
        raise UsageError(f"'{repo_id}' is neither a local path nor a Hub id ({first_line(error)})") from error
    except (
        errors.HfHubHTTPError,
        errors.LocalEntryNotFoundError,
        errors.OfflineModeIsEnabled,
        http_error,
    ) as error:
        raise _explain(error, repo_id, revision) from error
    except OSError as error:
        if error.errno is None:
            raise _explain(error, repo_id, revision) from error
        raise ResourceError(
            f"downloading '{repo_id}' failed: {error.strerror} ({error.filename or 'in its cache'})",
            "Free disk space, or set HF_HOME to a disk that has some",
        ) from error
    path = Path(folder)
    if not path.is_dir() or not any(path.iterdir()):
        raise ModelError(f"'{repo_id}' on the Hub holds no config.json and no safetensors weights")
    return path


def _explain(error: BaseException, repo_id: str, revision: str | None) -> LinearizeError:
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{repo_id}"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError):  # a subclass of "not found": has to come first
        return NetworkError(
            f"'{repo_id}' is gated: its owner grants access to each user",
            f"Request access at {page}, then log in with `hf auth login` (or set HF_TOKEN)",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return NetworkError(f"'{repo_id}' has no revision '{revision}'", f"See {page}/tree/main for what it has")
    if isinstance(error, errors.RepositoryNotFoundError):
        return NetworkError(
            f"there is no model '{repo_id}' on the Hub, or it is private; and no local folder has that name",
            "Check the name; for a private model log in with `hf auth login`",
        )
    if status in (401, 403):
        return NetworkError(
            f"the Hub refuses access to '{repo_id}' (HTTP {status})",
            f"Log in with `hf auth login` (or set HF_TOKEN) as a user who may read {page}",
        )
    if constants.HF_HUB_OFFLINE or isinstance(error, errors.OfflineModeIsEnabled):
        return NetworkError(
            f"'{repo_id}' isn't (wholly) in the cache, and offline mode is on; no local folder has that name",
            "Unset HF_HUB_OFFLINE to download it, or give a local folder",
        )
    return NetworkError(
        f"'{repo_id}' can't be downloaded ({_root_cause(error)}) and isn't in the cache",
        "Check the connection (or HF_ENDPOINT), or give a local folder",
    )


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {first_line(error)}"
