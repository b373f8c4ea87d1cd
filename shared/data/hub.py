"""Data sets from the Hugging Face hub, through its package `datasets`.

Without a network `datasets` 5.2 retries for 23 seconds and prints eleven lines of log before it
gives up. So we ask once, with a deadline, whether the hub answers. If it does not, `datasets` is
told to stay offline: what was loaded on this machine before still comes from its cache, anything
else ends at once in one clear line.
"""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from shared.data.files import shorten
from shared.errors import InputError

PROBE_SECONDS = 5.0


class HubDataset(NamedTuple):
    """Where a data set lies on the hub: the path and configuration that load_dataset takes."""

    path: str
    config: str | None = None


# Columns: multi30k has "en" and "de"; wmt16 has "translation" with both; wikitext has "text".
HUB = {
    "multi30k": HubDataset("bentrevett/multi30k"),
    "wmt16": HubDataset("wmt/wmt16", "de-en"),
    "wikitext-2": HubDataset("Salesforce/wikitext", "wikitext-2-raw-v1"),
}


def load_from_hub(name: str, otherwise: str) -> Any:
    """Load a data set of HUB and return its splits, a mapping of name to rows.

    Args:
        name: a key of HUB.
        otherwise: what the user can do without the hub; it ends the message when loading fails.
    """
    import datasets  # takes more than a second to import, and only the hub needs it

    source = HUB[name]
    local = Path(source.path).is_dir()
    reachable = local or hub_answers(PROBE_SECONDS)
    try:
        with _offline(not reachable):
            splits = datasets.load_dataset(source.path, source.config)
    except Exception as error:  # the package raises some twenty types, of five libraries
        if reachable:
            reason = f"loading {source.path} failed ({type(error).__name__}: {shorten(str(error))})"
        else:
            reason = f"cannot reach the Hugging Face hub for {source.path}, and no copy is cached"
        raise InputError(f"dataset {name!r}: {reason}; {otherwise}") from error
    missing = {"train", "validation", "test"} - set(splits)
    if missing:
        raise InputError(
            f"dataset {name!r}: {source.path} has the splits {sorted(splits)}, "
            f"not {sorted(missing)}; {otherwise}"
        )
    return splits


def hub_answers(seconds: float) -> bool:
    """Whether the hub answers within the deadline; any answer counts, also an error page.

    The question is asked in a thread: a name server that does not answer blocks for much longer
    than any time-out that an HTTP client offers.
    """
    from huggingface_hub import constants, get_session

    answered = threading.Event()

    def ask() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=seconds)
        except Exception:  # no route, no name, refused, timed out, told to be offline: all "no"
            return
        answered.set()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return answered.is_set()


@contextmanager
def _offline(offline: bool) -> Generator[None, None, None]:
    """Keep `datasets` off the network inside the block, as HF_HUB_OFFLINE=1 would have."""
    import datasets.config

    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = before or offline
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before
