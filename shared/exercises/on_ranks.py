"""An answer on several ranks: what goes wrong there comes back as what a check says."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

from shared.exercises.guarding import call_guarded
from shared.exercises.wrong import Wrong
from shared.ranks.failures import Failure, RankFailed
from shared.ranks.forked import run_ranks

PATIENCE = 10.0  # seconds of processor time until ranks are ended; they need a tenth of one
QUIET = 3.0  # seconds without any work after which ranks that wait for each other are ended
Known = Mapping[Any, tuple[str, str]]  # by str, type[BaseException] or Failure: mistake and hint


def on_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    apart: str,
    expected: str = "every rank comes back",
    hint: str = "",
    known: Known | None = None,
    timeout: float = PATIENCE,
    quiet: float = QUIET,
) -> list[Any]:
    """`run_ranks`; ranks that hang and ranks that raise become findings.

    `apart` is the mistake where the ranks do not take part in the same collectives: some wait and
    never return, or lose a peer. `known` maps a part of an error's text, its type or the way in
    which a rank failed to the mistake and the hint that it stands for, and comes before `apart`.
    What a rank raised as `Wrong` is raised here as it is, and a switch that is left changed there.
    """
    work = partial(call_guarded, fn)
    try:
        return run_ranks(work, world_size, *args, timeout=timeout, quiet=quiet)
    except RankFailed as failed:
        raise_failure(failed, apart=apart, expected=expected, hint=hint, known=known)


def raise_failure(
    failed: RankFailed,
    *,
    apart: str,
    expected: str = "every rank comes back",
    hint: str = "",
    known: Known | None = None,
) -> NoReturn:
    """Raise what a failure of ranks says about the answer, in the words of `on_ranks`."""
    known = known or {}
    if failed.kind in known:
        mistake, advice = known[failed.kind]
        raise Wrong(mistake, expected, f"rank {failed.rank} {failed.kind}", advice) from None
    if failed.kind in (Failure.LATE, Failure.PEER_LOST) or failed.signal == "SIGABRT":
        raise Wrong(apart, expected, failed.headline, hint) from None
    raise_as_finding(failed, known, hint)


def on_one_rank(fn: Callable[[], Any], timeout: float = PATIENCE) -> Any:
    """The result of `fn` in a group of one rank; what it raises there is raised here."""
    try:
        return run_ranks(lambda rank: fn(), 1, timeout=timeout, quiet=QUIET)[0]
    except RankFailed as failed:
        if failed.error is not None:
            raise failed.error from None
        raise


def raise_as_finding(failed: RankFailed, known: Known, hint: str = "") -> NoReturn:
    """Raise what an error on a rank says about the answer."""
    if type(failed.error) is Wrong or isinstance(failed.error, NotImplementedError):
        raise failed.error from None
    named = (words for sign, words in known.items() if _shows(failed, sign))
    mistake, advice = next(named, ("", hint))
    seen = failed.headline + failed.at
    raise Wrong(mistake, "no error on any rank", seen, advice) from None


def _shows(failed: RankFailed, sign: Any) -> bool:
    if isinstance(sign, Failure):  # a str as well, and asked first for that reason
        return failed.kind is sign
    return sign in failed.error_text if isinstance(sign, str) else isinstance(failed.error, sign)
