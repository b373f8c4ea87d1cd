"""Regular verb forms: what the lexicon need not write out."""

_VOWELS = "aeiou"
# Verbs that double their last consonant before -ing; the rest of the lexicon does not.
_DOUBLING = frozenset({"forget", "get", "put", "run", "sit", "swim"})


def english_third(base: str) -> str:
    """The third person singular: watch, watches; carry, carries; have, has."""
    if base in ("have", "be"):
        return {"have": "has", "be": "is"}[base]
    if base.endswith("y") and base[-2] not in _VOWELS:
        return base[:-1] + "ies"
    return base + ("es" if base.endswith(("ch", "sh", "s", "x", "o")) else "s")


def english_past(base: str) -> str:
    """The regular past and participle: clean, cleaned; love, loved; cry, cried."""
    if base.endswith("y") and base[-2] not in _VOWELS:
        return base[:-1] + "ied"
    return base + ("d" if base.endswith("e") else "ed")


def english_ing(base: str) -> str:
    """The progressive participle: write, writing; run, running; lie, lying."""
    if base.endswith("ie"):
        return base[:-2] + "ying"
    if base.endswith("e") and not base.endswith("ee") and base != "be":
        return base[:-1] + "ing"
    return base + (base[-1] if base in _DOUBLING else "") + "ing"


def german_stem(infinitive: str) -> tuple[str, str]:
    """The stem and the e that it needs before -st and -t: (arbeit, e), (zeichn, e), (kauf, "")."""
    stem = infinitive.removesuffix("en")
    cluster = stem.endswith(("chn", "ffn", "gn"))
    return stem, "e" if stem.endswith(("t", "d")) or cluster else ""


def german_present(infinitive: str) -> tuple[str, str]:
    """The regular du and er: kaufst, kauft; arbeitest, arbeitet; tanzt, tanzt."""
    stem, e = german_stem(infinitive)
    du = "t" if stem.endswith(("s", "ß", "z", "x")) else f"{e}st"
    return stem + du, f"{stem}{e}t"


def german_past(infinitive: str) -> str:
    """The weak past: kaufte, arbeitete."""
    stem, e = german_stem(infinitive)
    return f"{stem}{e}te"


def german_participle(infinitive: str) -> str:
    """The weak participle: gekauft; verkauft, besucht, gehört and repariert take no ge."""
    stem, e = german_stem(infinitive)
    bare = infinitive.startswith(("be", "ver", "gehör")) or infinitive.endswith("ieren")
    return f"{'' if bare else 'ge'}{stem}{e}t"
