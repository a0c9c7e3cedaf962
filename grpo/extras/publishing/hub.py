"""Repositories of the Hugging Face hub, by its public client: created before heavy work, filled after it."""

import logging
from pathlib import Path

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id

from grpo.config.secrets import WELL_KNOWN
from grpo.utils.errors import ConfigError, RunError, described
from rewards.text import printable

LOG_IN = "log in with `hf auth login`, or set HF_TOKEN in the environment, with a token that may write"
TEXTS = ("*.md", "*.json", "*.jinja", "*.txt")


def create_repository(name: str, public: bool, option: str = "--push", to_public: str = "--public") -> None:
    """Create a repository for a model unless there is one, and ask whether this user may write to it.

    Args:
        name: OWNER/NAME.
        public: whether everybody may read it; a public repository is refused without it.
        option: the option that names the repository, for messages.
        to_public: the option that makes it public, for messages.

    Raises:
        ConfigError: the name is none, there is no token, the hub rejects it or cannot be reached, or the repository is
            public and `public` is false.
    """
    for library in ("httpx", "httpx2"):  # which log the signed addresses of uploads
        logging.getLogger(library).setLevel(logging.WARNING)
    check_name(name, option)
    if constants.is_offline_mode():
        raise ConfigError(f"{option}: HF_HUB_OFFLINE=1 forbids the network; unset it")
    if get_token() is None:
        raise ConfigError(f"{option}: no token of the hub; {LOG_IN}")
    api = HfApi()
    try:
        api.create_repo(name, private=not public, exist_ok=True)
        api.auth_check(name, write=True)
        private = api.model_info(name).private
    except Exception as error:  # of the client, of its HTTP library, whose name differs between versions
        raise ConfigError(f"{option}: {name}: {reason(error)}") from error
    if not (private or public):
        raise ConfigError(f"{option}: {name} is there and is public; add {to_public}, or name another repository")


def upload(folder: Path, name: str) -> str:
    """Upload a folder into a repository and return its address.

    Raises:
        ConfigError: a text of the folder has the form of a secret.
        RunError: the upload failed; the folder is complete.
    """
    refuse_secrets_in(folder)
    api = HfApi()
    try:
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload a model trained with GRPO")
    except Exception as error:
        again = f"`hf upload {name} {folder}` tries again"
        raise RunError(f"{name}: {reason(error)}; the model is in {folder}, {again}") from error
    return f"{api.endpoint}/{name}"


def check_name(name: str, option: str) -> None:
    """Raise a ConfigError unless a text is OWNER/NAME, as the hub allows it."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError(f"{option}: {' '.join(str(error).split())}") from error
    if name.count("/") != 1:
        raise ConfigError(f"{option}: {name!r} is no OWNER/NAME, with your name on the hub or an organization's")


def refuse_secrets_in(folder: Path) -> None:
    """Raise a ConfigError if a text of a folder has the form of a known token, such as a prompt that was typed."""
    for pattern in TEXTS:
        for file in folder.glob(pattern):
            if file.name != "tokenizer.json" and WELL_KNOWN.search(file.read_text(errors="replace")):
                raise ConfigError(f"{file}: a text in it has the form of a token or password; nothing was uploaded")


def reason(error: BaseException) -> str:
    """Return why the hub could not be used, with the remedy, and without the token."""
    while not isinstance(error, HfHubHTTPError) and error.__cause__:
        error = error.__cause__
    if not isinstance(error, HfHubHTTPError):
        return f"the hub at {constants.ENDPOINT} cannot be used ({without_token(described(error))})"
    status = error.response.status_code
    if status in (401, 403):
        return f"the hub {'rejects the token' if status == 401 else 'lets this token not write to it'}; {LOG_IN}"
    said = " ".join((error.server_message or described(error)).split())
    return printable(without_token(f"the hub answers {status}: {said}"))


def without_token(text: str) -> str:
    """Return a message in which a token, which a library may have quoted, is an ellipsis."""
    return text.replace(token, "…") if (token := get_token()) else text
